"""The Python entrance: `fairseq_el.accelerate(model)`."""

from collections.abc import Callable, Iterator
from typing import Any

from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models.speech_to_text.hub_interface import S2THubInterface
from torch import Tensor, nn

from fairseq_el.kernels.packing import check_precision
from fairseq_el.models.conversion import to_el_form
from fairseq_el.plugin.tasks import GIVEN_SENTENCES, generate_with_el


class ELHubInterface:
    """Mixed into what `from_pretrained` returns."""

    under_way: list[Tensor]
    """Numbers of the sentences in the batch that is generated. BART's interface makes batches of each batch again: then
    the second are numbers in the first."""

    def generate(
        self, tokenized_sentences, *args, prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        **options,
    ):  # fmt: skip
        """In stock fairseq the function is lost if there is one sentence, and BART's interface calls it with the number
        that a sentence has in its batch."""

        def allowed(number: int, tokens: Tensor) -> list[int]:
            is_nested = len(self.under_way) > 1
            return prefix_allowed_tokens_fn(int(self.under_way[0][number]) if is_nested else number, tokens)

        is_single = isinstance(tokenized_sentences, Tensor) and tokenized_sentences.dim() == 1
        if prefix_allowed_tokens_fn is not None:
            options["prefix_allowed_tokens_fn"] = allowed
        self.under_way = []
        found = super().generate(tokenized_sentences[None] if is_single else tokenized_sentences, *args, **options)
        return found[0] if is_single else found

    def _build_batches(self, tokens, *args, **options) -> Iterator[dict[str, Any]]:
        for batch in super()._build_batches(tokens, *args, **options):
            batch[GIVEN_SENTENCES] = len(tokens)
            self.under_way.append(batch["id"])
            yield batch
            self.under_way.pop()


def accelerate(model: nn.Module, precision: str = "auto") -> nn.Module:
    """Turns a loaded stock fairseq model into its EL form, in place, and returns it.

    Takes a model (`TransformerModel`, `BARTModel`) or what `from_pretrained` returns for a task of text or speech,
    whose `sample`, `translate`, `generate` or `predict` then use our generator too.

    precision: on a CPU, `auto`, which is exact, `fp32` or `fp16` of the weights, or faster and not exact, `bf16` or
    `int8`.
    """
    check_precision(precision)
    if isinstance(model, GeneratorHubInterface):
        for part in model.models:
            to_el_form(part, precision)
        generate_with_el(model.task)
        if not isinstance(model, ELHubInterface):
            model.__class__ = type(f"EL{type(model).__name__}", (ELHubInterface, type(model)), {})
        return model
    if isinstance(model, S2THubInterface):
        to_el_form(model.model, precision)
        generate_with_el(model.task)
        model.generator = model.task.build_generator([model.model], model.cfg.generation)
        return model
    return to_el_form(model, precision)
