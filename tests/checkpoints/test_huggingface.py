"""BART and GPT-2 between stock fairseq and Hugging Face Transformers: weights and vocabularies."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.bart import BARTModel
from fairseq.models.bart.model import bart_large_architecture
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_el.checkpoints.huggingface import bart, bart_to_huggingface, gpt2
from fairseq_el.checkpoints.huggingface.gpt2 import impossible_row
from fairseq_el.checkpoints.huggingface.vocabularies import gpt2_encoder
from fairseq_el.checkpoints.huggingface.weights import Weights
from fairseq_el.errors import UserError


@pytest.fixture
def tiny_bart():
    def build(**options):
        dictionary = Dictionary()
        for word in range(40):
            dictionary.add_symbol(f"w{word}")
        args = Namespace(
            encoder_embed_dim=16, encoder_ffn_embed_dim=32, encoder_layers=2, decoder_layers=3,
            encoder_attention_heads=4, decoder_attention_heads=2, max_source_positions=24,
            max_target_positions=24, **options,
        )  # fmt: skip
        bart_large_architecture(args)
        torch.manual_seed(3)
        task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
        model = BARTModel.build_model(args, task).eval()
        for parameter in model.parameters():  # biases and norms too, which start out as zeros and ones
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        return model, args

    return build


SEPARATE = {"share_all_embeddings": False, "share_decoder_input_output_embed": False}


@pytest.mark.parametrize("option", [{}, SEPARATE, {"share_all_embeddings": False}])
def test_transformers_computes_the_same_logits_from_converted_weights(tiny_bart, option):
    transformers = pytest.importorskip("transformers")
    model, args = tiny_bart(**option)
    weights, config = bart_to_huggingface(model.state_dict(), args)
    converted = transformers.BartForConditionalGeneration(transformers.BartConfig(**config)).eval()
    converted.load_state_dict(weights)

    source = torch.randint(4, 44, (3, 17))
    target = torch.randint(4, 44, (3, 9))
    with torch.no_grad():
        expected, _ = model(source, torch.full((3,), 17), target)
        found = converted(input_ids=source, decoder_input_ids=target).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_every_weight_is_carried_over_without_a_copy(tiny_bart):
    model, args = tiny_bart()
    weights, config = bart_to_huggingface(model.state_dict(), args)
    carried = {tensor.data_ptr() for tensor in weights.values()}
    assert {parameter.data_ptr() for parameter in model.parameters()} <= carried
    assert (config["encoder_layers"], config["decoder_layers"]) == (2, 3)
    assert (config["encoder_attention_heads"], config["decoder_attention_heads"]) == (4, 2)
    assert config["max_position_embeddings"] == 24
    assert config["vocab_size"] == 44


@pytest.mark.parametrize(
    "option, named",
    [
        ({"encoder_normalize_before": True}, "before each block"),
        ({"layernorm_embedding": False}, "without layer normalisation"),
        ({"encoder_learned_pos": False}, "sinusoidal"),
        ({"activation_fn": "tanh"}, "'tanh'"),
    ],
)
def test_a_model_that_transformers_cannot_express_is_refused_by_name(tiny_bart, option, named):
    model, args = tiny_bart(**option)
    with pytest.raises(UserError, match=named):
        bart_to_huggingface(model.state_dict(), args)


def test_parts_that_transformers_has_no_place_for_are_refused_by_name(tiny_bart):
    model, args = tiny_bart()
    weights = {**model.state_dict(), "encoder.layers.1.adapter.weight": torch.ones(2)}
    with pytest.raises(UserError, match="encoder.layers.1.adapter.weight"):
        bart_to_huggingface(weights, args)
    rows = model.state_dict()["decoder.embed_tokens.weight"][:-1]
    with pytest.raises(UserError, match="embeddings of different sizes"):
        bart_to_huggingface({**model.state_dict(), "decoder.embed_tokens.weight": rows}, args)


# --- precision -----------------------------------------------------------------------------------

GPT2 = {
    "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6, "eos_token_id": 8,
}  # fmt: skip


def gpt2_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "wte.weight": (9, 8), "wpe.weight": (6, 8), "ln_f.weight": 8, "ln_f.bias": 8,
        "h.0.ln_1.weight": 8, "h.0.ln_1.bias": 8, "h.0.ln_2.weight": 8, "h.0.ln_2.bias": 8,
        "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": 24,
        "h.0.attn.c_proj.weight": (8, 8), "h.0.attn.c_proj.bias": 8,
        "h.0.mlp.c_fc.weight": (8, 32), "h.0.mlp.c_fc.bias": 32,
        "h.0.mlp.c_proj.weight": (32, 8), "h.0.mlp.c_proj.bias": 8,
    }  # fmt: skip
    torch.manual_seed(2)
    return {name: 1 + 0.3 * torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def converted(kind, stored: dict[str, torch.Tensor], config: dict, dtype) -> dict[str, torch.Tensor]:
    return dict(kind.convert(Weights(stored, kind.PREFIX, dtype), kind.checked(config)))


@pytest.mark.parametrize("model", ["gpt2", "bart"])
@pytest.mark.parametrize(
    "stored, asked, expected",
    [
        (torch.float16, None, torch.float16),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
    ],
)
def test_weights_keep_their_precision_or_get_the_one_asked_for(tiny_bart, model, stored, asked, expected):
    if model == "gpt2":
        weights = converted(gpt2, gpt2_weights(stored), GPT2, asked)
    else:
        fairseq_model, args = tiny_bart()
        renamed, config = bart_to_huggingface(fairseq_model.to(stored).state_dict(), args)
        weights = converted(bart, renamed, config, asked)
    assert {weight.dtype for weight in weights.values()} == {expected}


def test_numbers_that_half_precision_cannot_hold_are_refused():
    weights = gpt2_weights()
    weights["h.0.mlp.c_fc.weight"][3, 3] = 1e6
    with pytest.raises(UserError, match=r"h\.0\.mlp\.c_fc\.weight .* half precision: use --precision fp32"):
        converted(gpt2, weights, GPT2, torch.float16)


# --- what GPT-2 lacks ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    width=st.sampled_from([16, 128, 768]),
    spread=st.sampled_from([0.0, 1e-4, 0.1, 3.0]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
def test_an_impossible_row_is_far_below_the_best_word_whatever_is_normalised(seed, width, spread, dtype):
    torch.manual_seed(seed)
    words = torch.randn(50, width).mul(0.2).to(dtype)
    gain = torch.rand(width).mul(3).add(0.2).to(dtype)
    row, bias = impossible_row(words, gain, torch.randn(width).mul(spread).to(dtype))
    # the worst input for the row, and many random ones, some with an entry that dwarfs all others
    scaled = row.double() * gain.double()
    worst = (scaled - scaled.mean()) / scaled.std()
    inputs = torch.cat([worst[None].float(), 1 + torch.randn(300, width)])
    inputs[200:] += 3000 * nn.functional.one_hot(torch.randint(width, (101,)), width)
    norm = nn.LayerNorm(width)
    norm.weight.data, norm.bias.data = gain.float(), bias.float()
    with torch.no_grad():
        normalised = norm(inputs)
    best = (normalised @ words.float().t()).amax(dim=1)
    assert (normalised @ row.float() < best - 39).all()


def test_a_bias_that_does_without_help_is_left_alone():
    torch.manual_seed(1)
    words, gain, bias = torch.randn(50, 768), 1 + torch.rand(768), torch.rand(768)
    for dtype in (torch.float16, torch.float32):
        given_bias = bias.to(dtype)
        assert torch.equal(impossible_row(words.to(dtype), gain.to(dtype), given_bias)[1], given_bias)


def test_a_bias_of_zero_is_moved_less_than_logits_show(caplog):
    torch.manual_seed(1)
    words, gain = 0.14 * torch.randn(50, 768), 1 + torch.rand(768)
    _, bias = impossible_row(words, gain, torch.zeros(768))
    assert 0 < (words @ bias).abs().max() < 1e-4
    assert "logits will differ" not in caplog.text
    assert "convert with --precision fp16 what is to run with --fp16" in caplog.text
    impossible_row(words.half(), gain.half(), torch.zeros(768).half())
    assert "logits will differ from the original's by up to 0.0" in caplog.text


def test_gains_of_zero_are_refused():
    gain = torch.ones(16)
    gain[3] = 0.0
    with pytest.raises(UserError, match="ln_f"):
        impossible_row(torch.randn(50, 16), gain, torch.ones(16))


# --- vocabularies --------------------------------------------------------------------------------


def test_gpt2s_numbers_follow_from_its_merges():
    encoder = gpt2_encoder([("Ġ", "t"), ("h", "e"), ("Ġt", "he")])
    known = {"!": 0, "a": 64, "Ċ": 198, "Ġ": 220, "Ġt": 256, "he": 257, "Ġthe": 258}
    assert {piece: encoder[piece] for piece in known} == known  # the bytes and " t" as OpenAI has them
    assert encoder["<|endoftext|>"] == len(encoder) - 1 == 259
