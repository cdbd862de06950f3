"""The encoder gives what stock's gives, and does no work on padding."""

import pytest
import torch

from fairseq_el.kernels import build, ops
from fairseq_el.models.encoder import CPU_GROUP_TOKENS, split_by_tokens


def padded_batch(lengths: list[int], pad: int, eos: int) -> torch.Tensor:
    """Random sentences, padded on the left as fairseq does: [b, n]"""
    tokens = torch.full((len(lengths), max(lengths)), pad)
    for row, length in enumerate(lengths):
        tokens[row, -length:] = torch.randint(10, 5000, (length,))
        tokens[row, -1] = eos
    return tokens


@pytest.mark.parametrize(
    "lengths",
    [[60, 60, 60], [150, 40, 90], [500, 300, 512, 60], [3, 1, 2], [49]],
    ids=["no padding", "padding", "several groups", "short sentences", "one sentence"],
)
@pytest.mark.parametrize("kernel", ["ours", "torch's"])
def test_states_equal_stocks_at_all_real_positions(stock, el, lengths, kernel, monkeypatch):
    if kernel == "torch's":
        monkeypatch.setattr(ops, "supported", lambda x, width: False)
    torch.manual_seed(len(lengths))
    theirs, ours = stock().models[0].encoder.eval(), el().models[0].encoder.eval()
    tokens = padded_batch(lengths, theirs.padding_idx, eos=2)
    with torch.no_grad():
        expected = theirs(tokens, src_lengths=None)
        found = ours(tokens, src_lengths=None)
    assert set(found) == set(expected)
    real = tokens.ne(theirs.padding_idx).T  # [n, b]
    torch.testing.assert_close(
        found["encoder_out"][0][real], expected["encoder_out"][0][real], atol=1e-5, rtol=1e-4
    )
    assert torch.equal(found["encoder_padding_mask"][0], expected["encoder_padding_mask"][0])
    assert torch.equal(found["src_lengths"][0], expected["src_lengths"][0])


@pytest.mark.parametrize("lengths", [[400, 60, 70], [30, 2, 5]], ids=["long", "short"])
def test_padding_does_not_go_through_the_layers(el, lengths):
    if build.library() is None and max(lengths) < 48:
        pytest.skip("the kernels were not compiled")
    encoder = el().models[0].encoder.eval()
    seen = []
    encoder.layers[0].fc1.register_forward_hook(lambda module, args, out: seen.append(args[0].size(0)))
    with torch.no_grad():
        encoder(padded_batch(lengths, encoder.padding_idx, eos=2), src_lengths=None)
    assert sum(seen) == sum(lengths)


def test_groups_are_neighbours_and_cover_all_sentences():
    most = CPU_GROUP_TOKENS
    assert split_by_tokens([most, 1, most - 1, 2]) == [slice(0, 1), slice(1, 3), slice(3, 4)]
    assert split_by_tokens([3 * most]) == [slice(0, 1)]


def test_training_goes_through_stock_code(el):
    model = el().models[0].train()
    tokens = padded_batch([60, 90], model.encoder.padding_idx, eos=2)
    out = model.encoder(tokens, src_lengths=None)["encoder_out"][0]
    out.sum().backward()
    assert model.encoder.layers[0].self_attn.q_proj.weight.grad is not None
