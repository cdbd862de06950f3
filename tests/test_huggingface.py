"""Stock fairseq BART weights in the shape of Hugging Face Transformers."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.bart import BARTModel
from fairseq.models.bart.model import bart_large_architecture

from fairseq_el.huggingface import bart_to_huggingface


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
        for (
            parameter
        ) in model.parameters():  # biases and norms too, which start out as zeros and ones
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        return model, args

    return build


def test_transformers_computes_the_same_logits_from_converted_weights(tiny_bart):
    transformers = pytest.importorskip("transformers")
    model, args = tiny_bart()
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
        (
            {"share_all_embeddings": False, "share_decoder_input_output_embed": False},
            "separate embeddings",
        ),
    ],
)
def test_a_model_that_transformers_cannot_express_is_refused_by_name(tiny_bart, option, named):
    model, args = tiny_bart(**option)
    with pytest.raises(ValueError, match=named):
        bart_to_huggingface(model.state_dict(), args)
