"""Kernel launches and host reads of a decoding step: with small batches, a GPU is as fast as launches are issued."""

import functools

import pytest
from cuda_models import DICTIONARY, build, generate, kernels, prompts, sources
from fairseq.sequence_generator import SequenceGenerator

import fairseq_el
from fairseq_el.generation.generator import ELSequenceGenerator
from fairseq_el.generation.language import ELLanguageGenerator
from simulated import SimulatedDevice

LAYERS, BEAM, STEPS = 12, 4, 12
LAUNCHES, READS = 0.6, 0.5  # of stock fairseq's, at most


def count(cls, choice: str = "torch", **options) -> SimulatedDevice:
    make = functools.partial(
        cls, tgt_dict=DICTIONARY, beam_size=BEAM, max_len_b=STEPS - 1, min_len=STEPS - 1, **options
    )
    model = build("bart", decoder_layers=LAYERS)
    if cls is ELSequenceGenerator:
        model = fairseq_el.accelerate(model)
    with SimulatedDevice() as device, kernels(device, choice):
        generate(make, [model], sources(), device)
    return device


@pytest.fixture(scope="module")
def stock() -> SimulatedDevice:
    return count(SequenceGenerator)


@pytest.mark.parametrize("form", ["always", "never"])
def test_launches_and_reads_of_a_step(stock, form):
    ours = count(ELSequenceGenerator, "triton", el_attention=form)
    print(f"{form}: {ours.launches / STEPS:.1f} launches and {ours.reads / STEPS:.2f} reads a step; "
          f"stock fairseq: {stock.launches / STEPS:.1f} and {stock.reads / STEPS:.2f}")  # fmt: skip
    assert ours.launches <= LAUNCHES * stock.launches, ours.where("launch")
    assert ours.reads <= READS * stock.reads, ours.where("read")


def test_without_triton_launches_stay_below_stock(stock):
    ours = count(ELSequenceGenerator, "torch", el_attention="always")
    assert ours.reads <= READS * stock.reads
    assert ours.launches <= 0.8 * stock.launches


def test_one_read_a_step_of_language_models():
    def reads(new_tokens: int) -> int:
        make = functools.partial(
            ELLanguageGenerator, tgt_dict=DICTIONARY, beam_size=BEAM, max_new_tokens=new_tokens, min_len=50,
            max_len_b=50, el_attention="always",
        )  # fmt: skip
        prefix = prompts()["net_input"]["src_tokens"]
        with SimulatedDevice() as device, kernels(device, "triton"):
            generate(make, [fairseq_el.accelerate(build("language"))], prompts(), device, prefix_tokens=prefix)
        return device.reads

    assert reads(25) - reads(5) == 20


def test_one_read_a_step():
    """The candidates; what else is read belongs to the batch."""
    ours = count(ELSequenceGenerator, "triton", el_attention="always")
    in_loop = {line: times for line, times in ours.where("read").items() if times >= STEPS}
    assert list(in_loop.values()) == [STEPS] and next(iter(in_loop)).startswith("generation/search.py")
