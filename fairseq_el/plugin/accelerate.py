"""The Python entrance: `fairseq_el.accelerate(model)`."""

from fairseq.hub_utils import GeneratorHubInterface
from torch import nn

from fairseq_el.models.conversion import to_el_form
from fairseq_el.plugin.tasks import generate_with_el


def accelerate(model: nn.Module) -> nn.Module:
    """Turns a loaded stock fairseq model into its EL form, in place, and returns it.

    Takes a model (`TransformerModel`, `BARTModel`) or what `from_pretrained` returns, whose `sample`,
    `translate` and `generate` then use our generator too.
    """
    if isinstance(model, GeneratorHubInterface):
        for part in model.models:
            to_el_form(part)
        generate_with_el(model.task)
        return model
    return to_el_form(model)
