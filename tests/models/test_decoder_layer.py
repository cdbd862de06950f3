"""A decoding step of a layer in one kernel computes what fairseq's layer computes, and leaves the rest to it."""

import copy

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import nn

from fairseq_el.kernels import build
from fairseq_el.kernels.packing import pack
from fairseq_el.kernels.weights import packed_gemm_is_fastest
from fairseq_el.models import decoder_layer
from fairseq_el.models.attention import CachedSelfAttention, ELAttention, PromptAttention
from fairseq_el.models.caches import CrossAttentionCache, Prefill, PromptCache, SelfAttentionCache
from fairseq_el.models.decoder_layer import FusedDecoderLayer
from fairseq_el.models.policy import AttentionPolicy

compiled = pytest.mark.skipif(build.library() is None, reason="the kernels were not compiled")
WIDTH, SENTENCES, BEAM, STEPS, LENGTH = 64, 3, 2, 4, 21


@pytest.fixture
def fused_calls(monkeypatch):
    calls = []
    kernel = decoder_layer.decoder_layer
    monkeypatch.setattr(decoder_layer, "decoder_layer", lambda *args: calls.append(args) or kernel(*args))
    return calls


def stock_layer(attends: bool = True, activation: str = "gelu", norm_first: bool = False) -> nn.Module:
    config = TransformerConfig(activation_fn=activation, dropout=0.0)
    config.decoder.embed_dim, config.decoder.ffn_embed_dim, config.decoder.attention_heads = WIDTH, 96, 2
    config.encoder.embed_dim, config.decoder.normalize_before = WIDTH, norm_first
    layer = TransformerDecoderLayerBase(config, no_encoder_attn=not attends).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer.make_generation_fast_()
    return layer


def el_layer(layer: nn.Module, precision: str) -> nn.Module:
    """A copy, in EL form and packed."""
    layer = copy.deepcopy(layer)
    layer.__class__ = FusedDecoderLayer
    layer.self_attn.__class__ = PromptAttention if layer.encoder_attn is None else CachedSelfAttention
    if layer.encoder_attn is not None:
        layer.encoder_attn.__class__ = ELAttention
    pack(layer, precision)
    return layer


def low(precision: str) -> str | None:
    return precision if precision in ("bf16", "int8") else None


@torch.no_grad()
def decode(layer: nn.Module, inputs: torch.Tensor, source: torch.Tensor, precision: str, form: str = "never"):
    """inputs: [steps, b * x, d], source: [n, b, d], its last sentence padded; returns [steps, b * x, d]."""
    b = source.size(1)
    cache = SelfAttentionCache(BEAM, low_precision=low(precision))
    state, policy = {cache.KEY: cache}, AttentionPolicy(form)
    mask = torch.zeros(b, LENGTH, dtype=torch.bool)
    mask[-1, -5:] = True
    if layer.encoder_attn is not None:
        prefix = CrossAttentionCache(source.transpose(0, 1), mask, policy, low_precision=low(precision))
    else:
        prefix = PromptCache((~mask).sum(1), 1, BEAM, True, policy, low_precision=low(precision))
        prefill = Prefill(prefix, slice(0, b), LENGTH)
        layer(source.reshape(1, -1, WIDTH), incremental_state={Prefill.KEY: prefill})
    state[prefix.KEY] = prefix
    prefix.switching = form == "never"
    outputs = []
    for x in inputs:
        cache.begin_step(torch.zeros(b * BEAM, dtype=torch.bool))
        key = None if layer.encoder_attn is None else source
        outputs.append(layer(x.unsqueeze(0), key, mask, state, need_attn=True)[0].squeeze(0))
    return torch.stack(outputs)


@torch.no_grad()
def decode_by_stock(layer: nn.Module, inputs: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Every row for itself, with its own copy of the source."""
    rows = []
    for row in range(inputs.size(1)):
        mine = source[:, row // BEAM, None]
        mine = mine[:-5] if row // BEAM == source.size(1) - 1 else mine
        if layer.encoder_attn is None:
            x = torch.cat([mine, inputs[:, row, None]])
            future = torch.full((x.size(0), x.size(0)), -torch.inf).triu(1)
            rows.append(layer(x, self_attn_mask=future)[0][-len(inputs) :])
        else:
            state: dict = {}
            rows.append(torch.cat([layer(x[None, row, None], mine, None, state)[0] for x in inputs]))
    return torch.cat(rows, dim=1)


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(STEPS, SENTENCES * BEAM, WIDTH), torch.randn(LENGTH, SENTENCES, WIDTH)


@compiled
@pytest.mark.parametrize("attends", [True, False], ids=["encoder-decoder", "language model"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_accurate"])
def test_a_fused_step_equals_stocks(attends, norm_first, activation, fused_calls):
    stock, (inputs, source) = stock_layer(attends, activation, norm_first), random_inputs()
    ours = decode(el_layer(stock, "fp32"), inputs, source, "fp32")
    assert len(fused_calls) == STEPS
    torch.testing.assert_close(ours, decode_by_stock(stock, inputs, source), atol=2e-5, rtol=2e-5)


@compiled
@pytest.mark.parametrize("attends", [True, False], ids=["encoder-decoder", "language model"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_a_fused_step_in_each_precision_equals_the_separate_operations(attends, precision, fused_calls, monkeypatch):
    layer, (inputs, source) = el_layer(stock_layer(attends), precision), random_inputs()
    fused = decode(layer, inputs, source, precision)
    monkeypatch.setattr(FusedDecoderLayer, "describe", lambda self: None)
    apart = decode(layer, inputs, source, precision)
    with_fbgemm = precision == "fp16" and not packed_gemm_is_fastest()
    assert len(fused_calls) == (0 if with_fbgemm else STEPS)  # its layers run apart
    # a rounding error may move an activation to the next number of the lower precision
    tolerance = {"fp16": 2e-5, "bf16": 0.02, "int8": 0.05}[precision]
    torch.testing.assert_close(fused, apart, atol=tolerance, rtol=tolerance)


@compiled
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_row_does_not_depend_on_other_sentences_or_threads(precision):
    layer, (inputs, source) = el_layer(stock_layer(), precision), random_inputs()
    together = decode(layer, inputs, source, precision)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        last = decode(layer, inputs[:, -BEAM:], source[:, -1:], precision)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together[:, -BEAM:], last)


def hooked(layer):
    layer.fc1.register_forward_hook(lambda module, args, output: output * 2)


def scaled_heads(layer):
    layer.c_attn = nn.Parameter(torch.tensor([2.0, 0.5]))


def other_attention(layer):
    layer.self_attn.__class__ = type("Mine", (CachedSelfAttention,), {})


@pytest.mark.parametrize("change", [hooked, scaled_heads, other_attention])
def test_what_the_kernel_lacks_is_left_to_fairseq(change, fused_calls):
    layer, (inputs, source) = el_layer(stock_layer(), "fp32"), random_inputs()
    change(layer)
    found = decode(layer, inputs, source, "fp32")
    assert not fused_calls
    layer.__class__ = TransformerDecoderLayerBase
    torch.testing.assert_close(found, decode(layer, inputs, source, "fp32"))


def test_without_keys_and_values_the_layer_uses_el_attention(fused_calls):
    stock, (inputs, source) = stock_layer(), random_inputs()
    ours = decode(el_layer(stock, "fp32"), inputs, source, "fp32", form="always")
    assert not fused_calls
    torch.testing.assert_close(ours, decode_by_stock(stock, inputs, source), atol=2e-5, rtol=2e-5)


def test_in_training_the_layer_is_fairseqs():
    stock = stock_layer()
    ours = copy.deepcopy(stock)
    ours.__class__ = FusedDecoderLayer
    inputs, source = random_inputs()
    x = inputs.flatten(0, 1).view(STEPS * BEAM, SENTENCES, WIDTH)
    for a, b in zip(ours.train()(x, source)[:1], stock.train()(x, source)[:1]):
        torch.testing.assert_close(a, b)
    assert type(ours.self_attn) is MultiheadAttention
