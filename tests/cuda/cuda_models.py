"""Small models with random weights, and generations of them on the CPU and on the simulated device."""

from argparse import Namespace
from contextlib import contextmanager
from unittest import mock

import torch
from fairseq.data import Dictionary
from fairseq.models.bart import BARTModel, bart_base_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

import fairseq_el
from fairseq_el.kernels.packing import pack
from fairseq_el.kernels.triton import library
from simulated import SimulatedDevice, on_host
from simulated.triton import SimulatedKernels

DICTIONARY = Dictionary()
for number in range(120):
    DICTIONARY.add_symbol(str(number))
TASK = Namespace(
    source_dictionary=DICTIONARY, target_dictionary=DICTIONARY, dictionary=DICTIONARY, output_dictionary=DICTIONARY
)
SMALL = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("embed_dim", 32), ("ffn_embed_dim", 48), ("attention_heads", 2), ("layers", 2))
}


def build(kind: str, seed: int = 1, **settings):
    """kind: `bart` (learned positions), `transformer` (sinusoidal ones) or `language` (of either)."""
    torch.manual_seed(seed)
    if kind == "language":
        sizes = {name: value for name, value in SMALL.items() if name.startswith("decoder")}
        config = TransformerLanguageModelConfig(**sizes, tokens_per_sample=64, max_target_positions=64, **settings)
        return TransformerLanguageModel.build_model(config, TASK).eval()
    shared = {"share_all_embeddings": True, "max_source_positions": 64, "max_target_positions": 64}
    args = Namespace(**SMALL | shared | settings)
    architecture, model = {
        "bart": (bart_base_architecture, BARTModel), "transformer": (base_architecture, TransformerModel),
    }[kind]  # fmt: skip
    architecture(args)
    return model.build_model(args, TASK).eval()


def sources() -> dict:
    """Three sentences of different lengths, padded in front as fairseq's translation task does."""
    tokens = torch.randint(4, 120, (3, 9), generator=torch.Generator().manual_seed(2))
    tokens[1, :4] = tokens[2, :1] = DICTIONARY.pad()
    tokens[:, -1] = DICTIONARY.eos()
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([9, 5, 8])}, "id": torch.tensor([4, 2, 7])}


def prompts() -> dict:
    tokens = torch.randint(4, 120, (3, 6), generator=torch.Generator().manual_seed(3))
    tokens[1, 4:] = tokens[2, 5:] = DICTIONARY.pad()
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([6, 4, 5])}}


@contextmanager
def kernels(device: SimulatedDevice, choice: str):
    """choice: `torch`, `triton`, or `interpreted`, which is Triton's interpreter instead of torch in its place."""
    simulated = None if choice == "torch" else SimulatedKernels(device, interpreted=choice == "interpreted")
    with mock.patch.object(library, "kernels_on", lambda device: simulated):
        yield


def generate(make_generator, models, sample, device: SimulatedDevice | None = None, prepared=True, **arguments):
    """Hypotheses of a search, on the CPU without a device, else on it; EL models are prepared for inference there."""
    torch.manual_seed(11)
    if device is None:
        return make_generator(models).generate(models, sample, **arguments)
    for model in models:
        model.cuda()
        if prepared and fairseq_el.models.conversion.is_accelerated(model):
            pack(model)
    generator = make_generator(models)
    sample, arguments = to_device(sample), to_device(arguments)
    device.reset()
    return generator.generate(models, sample, **arguments)


def to_device(value):
    if isinstance(value, dict):
        return {name: to_device(entry) for name, entry in value.items()}
    return value.cuda() if isinstance(value, torch.Tensor) else value


def on_cpu(hypotheses: list[list[dict]]) -> list[list[dict]]:
    return [[{name: on_host(value) for name, value in h.items()} for h in sentence] for sentence in hypotheses]
