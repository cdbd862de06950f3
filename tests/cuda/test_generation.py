"""Generation on a (simulated) GPU finds what it finds on a CPU, and mixes no devices."""

import functools

import pytest
import torch
from cuda_models import DICTIONARY, build, generate, kernels, on_cpu, prompts, sources
from fairseq import search
from fairseq.models.bart import BARTModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.token_generation_constraints import pack_constraints

import fairseq_el
from fairseq_el.generation.generator import ELSequenceGenerator, ELSequenceGeneratorWithAlignment
from fairseq_el.generation.language import ELLanguageGenerator
from fairseq_el.generation.non_finite import NotFinite
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.models import caches
from fairseq_el.models.costs import Machine
from helpers import DEMO, TEXTS, assert_same_hypotheses
from simulated import SimulatedDevice

PREFIX = torch.tensor([[7, 8, 9], [7, 1, 1], [12, 13, 1]])
CLOSED = torch.tensor([[7, 8], [9, 2], [5, 1]])  # the second is a whole text
CONSTRAINTS = pack_constraints([[torch.tensor([40])], [torch.tensor([50, 51]), torch.tensor([60])], []])


def generator(cls, models, **options):
    return cls(models, DICTIONARY, **{"beam_size": 3, "max_len_b": 8, **options})


def strategy(make, **options):
    return lambda: make(DICTIONARY, **options)


STRATEGIES = {
    "beam": ({}, {}),
    "greedy": ({"beam_size": 1}, {}),
    "long": ({"max_len_b": 30, "min_len": 20}, {}),  # the self-attention cache grows
    "options": ({"temperature": 0.7, "unk_penalty": 0.5, "len_penalty": 2.0, "min_len": 3}, {}),
    "source-length": ({"match_source_len": True}, {}),
    "prefix": ({}, {"prefix_tokens": PREFIX}),
    "closed-prefix": ({}, {"prefix_tokens": CLOSED}),
    "n-grams": ({"no_repeat_ngram_size": 2, "min_len": 6}, {}),
    "budget": ({"el_memory_budget": 30_000}, {}),  # for one sentence at a time
    "diverse": ({"search_strategy": strategy(search.DiverseBeamSearch, num_groups=3, diversity_strength=0.5)}, {}),
    "sampling": ({"search_strategy": strategy(search.Sampling, sampling_topk=5)}, {}),
    "top-p": ({"search_strategy": strategy(search.Sampling, sampling_topp=0.8)}, {}),
    "constraints": (
        {"search_strategy": strategy(search.LexicallyConstrainedBeamSearch, representation="unordered"),
         "max_len_b": 12},
        {"constraints": CONSTRAINTS},
    ),
}  # fmt: skip


def both(cls, name_or_options, sample, build_models, choice, dtype=torch.float32, arguments=None):
    """Hypotheses on the CPU and on the device."""
    options, given = STRATEGIES[name_or_options] if isinstance(name_or_options, str) else (name_or_options, arguments)
    found = []
    for on_device in (False, True):
        chosen = {k: v() if k == "search_strategy" else v for k, v in options.items()}
        make = functools.partial(generator, cls, **chosen)
        models = [fairseq_el.accelerate(model).to(dtype) for model in build_models()]
        arguments = {k: v.clone() for k, v in (given or {}).items()}
        if not on_device:
            found.append(generate(make, models, sample, **arguments))
            continue
        with SimulatedDevice() as device, kernels(device, choice):
            found.append(on_cpu(generate(make, models, sample, device, **arguments)))
            assert device.launches > 0
    return found


@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("form", ["always", "never", "auto"])
def test_forms_of_attention(form, choice, monkeypatch):
    fast_measurement(monkeypatch)
    cpu, gpu = both(ELSequenceGenerator, {"el_attention": form}, sources(), lambda: [build("bart")], choice)
    assert_same_hypotheses(gpu, cpu)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(name):
    options, arguments = STRATEGIES[name]
    cpu, gpu = both(
        ELSequenceGenerator, {"el_attention": "always"} | options, sources(), lambda: [build("bart")], "triton",
        arguments=arguments,
    )  # fmt: skip
    assert_same_hypotheses(gpu, cpu)


@pytest.mark.parametrize("kind", ["bart", "transformer"])
def test_stock_finds_the_same_on_the_device(kind):
    """So it is the device that is right, not only our generator on it."""
    make = functools.partial(generator, SequenceGenerator)
    cpu = generate(make, [build(kind)], sources())
    with SimulatedDevice() as device, kernels(device, "triton"):
        stock = on_cpu(generate(make, [build(kind)], sources(), device))
        ours = functools.partial(generator, ELSequenceGenerator, el_attention="always")
        gpu = on_cpu(generate(ours, [fairseq_el.accelerate(build(kind))], sources(), device))
    assert_same_hypotheses(stock, cpu)
    assert_same_hypotheses(gpu, cpu)


def test_half_precision():
    for form in ("always", "never"):
        options = {"el_attention": form}
        cpu, gpu = both(ELSequenceGenerator, options, sources(), lambda: [build("bart")], "triton", torch.float16)
        assert_same_hypotheses(gpu, cpu, tolerance=0.02)


def test_ensembles_and_alignments():
    def two():
        return [build("bart"), build("bart", seed=2)]

    cpu, gpu = both(ELSequenceGenerator, {"el_attention": "never"}, sources(), two, "triton")
    assert_same_hypotheses(gpu, cpu)
    sample = sources() | {"target": sources()["net_input"]["src_tokens"]}
    sample["net_input"]["prev_output_tokens"] = sample["target"]
    cpu, gpu = both(ELSequenceGeneratorWithAlignment, {}, sample, lambda: [build("transformer")], "torch", None)
    for mine, other in zip(gpu, cpu):
        assert [h["alignment"] for h in mine] == [h["alignment"] for h in other]


@pytest.mark.parametrize("name", ["beam", "greedy", "n-grams", "budget", "sampling", "closed-prefix"])
@pytest.mark.parametrize("form", ["always", "never"])
def test_language_models(name, form):
    options, arguments = STRATEGIES[name]
    options = {"el_attention": form, "max_len_b": 16, **options}
    prefix = arguments.get("prefix_tokens", prompts()["net_input"]["src_tokens"])
    positions = {"decoder_learned_pos": form == "always"}  # else sinusoidal
    cpu, gpu = both(
        ELLanguageGenerator, options, prompts(), lambda: [build("language", **positions)], "triton",
        arguments={"prefix_tokens": prefix},
    )  # fmt: skip
    assert_same_hypotheses(gpu, cpu)


def test_language_models_without_triton_and_in_half_precision():
    prefix = {"prefix_tokens": prompts()["net_input"]["src_tokens"]}
    for choice, dtype in (("torch", torch.float32), ("triton", torch.float16)):
        options = {"el_attention": "always", "max_len_b": 14}
        cpu, gpu = both(
            ELLanguageGenerator, options, prompts(), lambda: [build("language")], choice, dtype, arguments=prefix
        )
        assert_same_hypotheses(gpu, cpu, tolerance=1e-4 if dtype == torch.float32 else 0.05)


def test_nan_stops_a_job_on_the_device_too():
    model = fairseq_el.accelerate(build("bart"))
    with torch.no_grad():
        model.decoder.layers[1].fc2.bias[3] = float("nan")

    def checking(models):
        made = generator(ELSequenceGenerator, models)
        made.model.checks_finite = True
        return made

    with SimulatedDevice() as device, kernels(device, "triton"), pytest.raises(NotFinite):
        generate(checking, [model], sources(), device)


def test_the_kernels_themselves_by_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
    for cls, kind, sample, arguments in (
        (ELSequenceGenerator, "bart", sources(), {}),
        (ELLanguageGenerator, "language", prompts(), {"prefix_tokens": prompts()["net_input"]["src_tokens"]}),
    ):
        options = {"el_attention": "always", "max_len_b": 4 if kind == "bart" else 10}
        cpu, gpu = both(cls, options, sample, lambda kind=kind: [build(kind)], "interpreted", arguments=arguments)
        assert_same_hypotheses(gpu, cpu)


def test_an_accelerated_hub_model(demo_data):
    hub = BARTModel.from_pretrained(
        str(DEMO), data_name_or_path=str(demo_data), bpe="sentencepiece",
        sentencepiece_model=str(DEMO / "sentencepiece.model"),
    )  # fmt: skip
    fairseq_el.accelerate(hub)
    expected = hub.sample(TEXTS[:2], beam=2, max_len_b=12)
    with SimulatedDevice() as device, kernels(device, "triton"):
        assert hub.cuda().sample(TEXTS[:2], beam=2, max_len_b=12) == expected
        assert device.launches > 0


def test_the_summarizer():
    options = {"preset": "demo", "search": "greedy"}
    expected = Summarizer.load(DEMO, **options)(TEXTS[:2])
    with SimulatedDevice() as device, kernels(device, "triton"):
        summarizer = Summarizer.load(DEMO, **options)
        assert next(summarizer.model.parameters()).is_cuda
        assert summarizer(TEXTS[:2]) == expected


def fast_measurement(monkeypatch) -> None:
    """`auto` measures the device, with 18 GFLOP: what it decides is no matter here."""
    monkeypatch.setattr(caches, "measure_machine", lambda *arguments: Machine(1e12, 1e11, 1e11))
