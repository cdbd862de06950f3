"""Variants of the C++ kernels: all of them compute the same, and the right one is picked."""

import logging

import pytest
import torch

from fairseq_el.errors import UserError
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.kernels import build, compiler, ops
from fairseq_el.kernels.formats import ACTIVATIONS, Padding, pack_bf16, pack_gemm, pack_int8
from fairseq_el.kernels.weights import packed_gemm_is_fastest
from helpers import TEXTS

VARIANTS = [*build.supported_variants(), build.PORTABLE, build.NATIVE]
SHAPES = [(1, 16, 1), (4, 64, 21), (7, 1024, 130), (33, 48, 64), (80, 256, 65)]

pytestmark = pytest.mark.skipif(build.library() is None, reason="the kernels were not compiled")


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    """The operations run on this variant."""
    kernels = build.kernels_of(request.param, "a test")
    monkeypatch.setattr(build, "library", lambda: kernels)
    return kernels


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def int8_results() -> list[torch.Tensor]:
    layers = [(drawn(rows, width), pack_int8(drawn(out, width), drawn(out))) for rows, width, out in SHAPES]
    return [ops.low_precision_gemm(x, layer, activation) for x, layer in layers for activation in ACTIVATIONS]


def other_results() -> list[torch.Tensor]:
    """Of all kernels that round."""
    found = []
    for rows, width, out in SHAPES:
        x, weight, bias = drawn(rows, width), drawn(out, width) / width**0.5, drawn(out)
        found += [ops.linear(x, weight, bias), ops.low_precision_gemm(x, pack_bf16(weight, bias)), ops.logsumexp(x)]
        found += [ops.packed_gemm(x, *pack_gemm(weight, bias, t), out) for t in (torch.float16, torch.float32)]
    found.append(ops.varlen_attention(drawn(60, 3 * 64), [13, 47], 4, 0.25))
    queries, padding = drawn(2, 40, 64), Padding.behind(torch.tensor([70, 33]))
    for dtype in (torch.float32, torch.float16):
        states = drawn(2, 70, 64).to(dtype)
        keys, values = (states.new_empty(2, 4, 16, 70) for _ in range(2))
        ops.transpose_heads(states.float(), keys)
        ops.transpose_heads(states.float() + 1, values)
        found.append(ops.el_attention(queries.clone(), states, padding)[0])
        found.append(ops.decoder_attention(queries, 4, 0.25, (keys, values), padding)[0])
    return found


EXPECTED_INT8, EXPECTED_OTHERS = int8_results(), other_results()


@pytest.mark.usefixtures("variant")
def test_int8_gives_the_same_bits():
    for found, expected in zip(int8_results(), EXPECTED_INT8, strict=True):
        assert torch.equal(found, expected)


def test_all_else_is_equal_up_to_rounding(variant):
    assert build.agrees_with_torch(variant)
    for found, expected in zip(other_results(), EXPECTED_OTHERS, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_summaries_are_the_same(variant):
    """Also where layers are packed in another way, as on a CPU without a variant."""
    summaries = Summarizer.load("demo", threads=1)(TEXTS[:6])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", lambda: None)
        assert summaries == Summarizer.load("demo", threads=1)(TEXTS[:6])


# ---- the choice


@pytest.fixture
def cpu(monkeypatch):
    """Sets the features of the CPU, and leaves nothing compiled by set-up but files of the right name."""

    def has(*features, prebuilt=tuple(compiler.VARIANTS), folder):
        monkeypatch.setattr(build, "cpu_features", lambda: " ".join(features))
        monkeypatch.setattr(compiler, "prebuilt_library", lambda variant: folder / variant)
        for variant in prebuilt:
            (folder / variant).touch()

    monkeypatch.setattr(build, "KernelLibrary", lambda file, variant, reason: (variant, reason))
    monkeypatch.setattr(build, "compiled_here", lambda variant, reason: (f"{variant}, compiled here", reason))
    return has


def first(wanted=build.AUTO) -> tuple[str, str]:
    return next(build.candidates(wanted))()


@pytest.mark.parametrize("expected", compiler.VARIANTS)
def test_the_best_variant_for_the_cpu_is_picked(expected, cpu, tmp_path):
    cpu(*compiler.VARIANTS[expected], "sse2", folder=tmp_path)
    assert first() == (expected, build.SET_UP)


def test_a_variant_that_set_up_did_not_compile_gives_way_to_the_next(cpu, tmp_path):
    cpu(*compiler.VARIANTS["avx512_vnni"], prebuilt=["avx512_bf16", "avx2"], folder=tmp_path)
    assert first()[0] == "avx2"


@pytest.mark.parametrize(("features", "prebuilt"), [(["sse2"], compiler.VARIANTS), (compiler.AVX2, ["avx512"])])
def test_where_nothing_fits_the_kernels_are_compiled_for_this_cpu(features, prebuilt, cpu, tmp_path):
    cpu(*features, prebuilt=prebuilt, folder=tmp_path)
    assert first() == ("native, compiled here", build.NONE_FITS)


def test_the_variable_chooses(cpu, tmp_path):
    cpu(*compiler.VARIANTS["avx512"], prebuilt=["avx2"], folder=tmp_path)
    assert first("avx2") == ("avx2", "FAIRSEQ_EL_KERNELS=avx2")
    assert first("avx512") == ("avx512, compiled here", "FAIRSEQ_EL_KERNELS=avx512")
    with pytest.raises(UserError, match="FAIRSEQ_EL_KERNELS=avx512_vnni .* lacks avx512_vnni: unset FAIRSEQ_EL_KER"):
        first("avx512_vnni")
    with pytest.raises(UserError, match="FAIRSEQ_EL_KERNELS=AVX names no kernels: give one of auto, off, avx512_bf16"):
        first("AVX")


def test_a_prebuilt_library_that_can_not_be_loaded_gives_way(monkeypatch, tmp_path):
    """Such as one of a newer system than this."""
    monkeypatch.delenv(build.VARIABLE, raising=False)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(compiler, "prebuilt_library", lambda variant: broken)
    kernels, problem = build.load.__wrapped__()
    assert kernels.variant == build.NATIVE and not problem


def test_compiling_is_said_in_one_line_and_happens_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiler, "SOURCES", [tmp_path / "changed.cpp"])
    monkeypatch.setattr(build, "SIGNATURES", {})
    (tmp_path / "changed.cpp").write_text('extern "C" int changed() { return 7; }')
    with caplog.at_level(logging.WARNING):
        kernels = build.kernels_of("avx2" if "avx2" in VARIANTS else build.PORTABLE, "a test")
        assert kernels.file.parent == tmp_path and kernels.changed() == 7
        build.kernels_of(kernels.variant, "a test")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"compiling the C++ kernels ({kernels.variant}), once on this machine"
    ]


def test_the_packed_gemm_is_used_with_avx2_and_better(variant):
    assert packed_gemm_is_fastest() == (variant.variant != build.PORTABLE and "avx2" in build.cpu_features().split())
