"""Packed layers compute what linear layers compute, and keep no second copy of a weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fairseq.modules import gelu, gelu_accurate
from fairseq.modules.transformer_layer import TransformerEncoderLayer
from torch import nn

from fairseq_el.kernels import build, ops
from fairseq_el.kernels.linear import PackedLinear, PackedMatrix, project_together
from fairseq_el.kernels.packing import HalfEmbedding, pack
from fairseq_el.kernels.weights import FP16, FP32, FP32_ROW_MAJOR, available
from helpers import assert_same_hypotheses

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not available(kind), reason="kernel"))
    for kind in (FP16, FP32, FP32_ROW_MAJOR)
]


def exact_linear(n_in=48, n_out=40, bias=True) -> nn.Linear:
    linear = nn.Linear(n_in, n_out, bias=bias)
    linear.weight.data = linear.weight.data.half().float()
    return linear


def packed_layer(linear: nn.Linear, kind: str) -> PackedLinear:
    return PackedLinear(linear, PackedMatrix([linear], kind))


@pytest.fixture(params=["with AVX2", "without", "no compiler"])
def machine(request, monkeypatch):
    """Layers are packed as this kind of machine packs them; all our kernels run on all machines."""
    if request.param != "no compiler" and build.library() is None:
        pytest.skip("the kernels were not compiled")
    monkeypatch.setattr("fairseq_el.kernels.weights.packed_gemm_is_fastest", lambda: request.param == "with AVX2")
    if request.param == "no compiler":
        monkeypatch.setattr(ops, "supported", lambda x, width: False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("machine")
def test_packed_equals_plain(kind, bias):
    linear = exact_linear(bias=bias)
    packed = packed_layer(linear, kind)
    for shape in ((1, 48), (33, 48), (2, 5, 48), (250, 48)):
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.weight, linear.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_the_packed_weight_replaces_the_original(kind):
    packed = packed_layer(exact_linear(), kind)
    assert [name for name, _ in packed.named_parameters()] == ["bias"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("machine")
def test_state_dicts_are_those_of_plain_layers(kind):
    linear, other = exact_linear(), exact_linear()
    packed = packed_layer(linear, kind)
    assert list(packed.state_dict()) == ["bias", "weight"] or list(packed.state_dict()) == ["weight", "bias"]
    packed.load_state_dict(other.state_dict())
    x = torch.randn(3, 48)
    torch.testing.assert_close(packed(x), other(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="weight"):
        packed.load_state_dict({"bias": other.bias})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_follow_the_model_to_other_precisions_and_back(kind):
    linear = exact_linear()
    packed = packed_layer(copy.deepcopy(linear), kind).double()
    x = torch.randn(3, 48)
    torch.testing.assert_close(packed(x.double()), copy.deepcopy(linear).double()(x.double()))
    torch.testing.assert_close(packed.float()(x), linear(x), atol=1e-5, rtol=1e-5)


ACTIVATIONS = {"relu": F.relu, "gelu": gelu, "gelu_accurate": gelu_accurate}


class UsersLayer(TransformerEncoderLayer):
    def forward(self, x, encoder_padding_mask):
        return self.activation_fn(x) + self.fc2(self.fc1(x))


def feed_forward_layer(el, activation: str, layer_class=TransformerEncoderLayer) -> nn.Module:
    """A layer of the demo model's shape, in evaluation mode, whose weights are exact in half precision."""
    args = copy.deepcopy(el().models[0].cfg)
    args.activation_fn = activation
    layer = layer_class(args).eval()
    for parameter in layer.parameters():
        parameter.data = parameter.data.half().float()
    return layer


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "tanh"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("machine")
@torch.no_grad()
def test_a_packed_feed_forward_block_applies_its_activation_once(el, kind, activation, monkeypatch):
    monkeypatch.setattr("fairseq_el.kernels.packing.choose_kind", lambda *args: kind)
    plain = feed_forward_layer(el, activation)
    packed = copy.deepcopy(plain)
    pack(packed)
    for rows in (3, 250):
        x = torch.randn(rows, 1, plain.embed_dim)
        torch.testing.assert_close(packed(x, None), plain(x, None), atol=1e-5, rtol=1e-5)
        if activation in ACTIVATIONS:
            torch.testing.assert_close(packed.fc1(x), ACTIVATIONS[activation](plain.fc1(x)), atol=1e-5, rtol=1e-5)
    as_double = plain.double()(x.double(), None)
    torch.testing.assert_close(packed.double()(x.double(), None), as_double)


@torch.no_grad()
def test_a_users_own_layer_keeps_its_activation_apart(el):
    plain = feed_forward_layer(el, "relu", UsersLayer)
    packed = copy.deepcopy(plain)
    pack(packed)
    x = torch.randn(3, 1, plain.embed_dim)
    torch.testing.assert_close(packed(x, None), plain(x, None), atol=1e-5, rtol=1e-5)


class Attention(nn.Module):
    projects_together = ("q", "k", "v")

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (exact_linear() for _ in range(4))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_used_together_share_a_matrix_and_keep_their_state_dicts(kind):
    plain, other = Attention(), Attention()
    joint = copy.deepcopy(plain)
    pack(joint, "auto" if kind == FP16 else FP32)
    assert joint.q.matrix is joint.k.matrix is joint.v.matrix is not joint.out.matrix
    x = torch.randn(3, 48)
    for reference in (plain, other):
        joint.load_state_dict(reference.state_dict())
        for ours, theirs in zip(project_together(x, joint.q, joint.k, joint.v), "qkv"):
            torch.testing.assert_close(ours, getattr(reference, theirs)(x), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(getattr(joint, theirs)(x), getattr(reference, theirs)(x), atol=1e-5, rtol=1e-5)
        for name, value in joint.state_dict().items():
            assert torch.equal(value, reference.state_dict()[name])


def test_a_packed_model_is_not_packed_again():
    model = nn.Sequential(nn.Embedding(8, 48), exact_linear())
    model[0].weight.data = model[0].weight.data.half().float()
    pack(model)
    layer, weights = model[1], model[0].weight
    pack(model)
    assert model[1] is layer and model[0].weight is weights and weights.dtype == torch.float16


def test_single_precision_needs_no_copy_of_a_tied_embedding():
    if build.library() is None:
        pytest.skip("the kernels were not compiled")
    embedding, projection = nn.Embedding(50, 48), nn.Linear(48, 50, bias=False)
    projection.weight = embedding.weight
    model = nn.ModuleList([embedding, projection])
    pack(model, "fp32")
    assert model[1].weight.data_ptr() == embedding.weight.data_ptr()


def test_half_precision_is_used_only_if_it_is_exact_or_requested():
    exact, inexact = exact_linear(), nn.Linear(48, 40)
    inexact.weight.data[0, 0] = 1 / 3
    model = nn.Sequential(exact, inexact)
    pack(model)
    assert [layer.matrix.kind for layer in model] == [FP16, FP32]
    requested = nn.Sequential(nn.Linear(48, 40)).half()
    pack(requested)
    assert requested[0].matrix.kind == FP16
    assert requested(torch.randn(1, 48)).dtype == torch.float32
    forced = nn.Sequential(exact_linear())
    pack(forced, "fp32")
    assert forced[0].matrix.kind == FP32
    rounded = nn.Sequential(nn.Linear(48, 40))
    pack(rounded, "fp16")
    assert rounded[0].matrix.kind == FP16


def test_a_tied_embedding_is_kept_in_half_precision_beside_its_packed_twin():
    embedding, projection = nn.Embedding(50, 48), nn.Linear(48, 50, bias=False)
    embedding.weight.data = embedding.weight.data.half().float()
    projection.weight = embedding.weight
    model = nn.ModuleList([embedding, projection])
    before = embedding(torch.arange(50))
    pack(model)
    assert isinstance(embedding, HalfEmbedding)
    assert embedding.weight.dtype == torch.float16
    assert torch.equal(embedding(torch.arange(50)), before)


@pytest.mark.parametrize("form", ["always", "never", "auto"])
@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_same_hypotheses_with_every_exact_precision_and_form(stock, el, precision, form):
    system = el(el_attention=form)
    for model in system.models:
        pack(model, precision)
    assert_same_hypotheses(system.generate(beam=4), stock().generate(beam=4))
