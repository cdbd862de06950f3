"""Small seeded models of Transformers, and folders of them as `save_pretrained` and the released models have them."""

import json
from pathlib import Path

import pytest
import torch
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

transformers = pytest.importorskip("transformers")

MERGES = [
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("r", "e"), ("o", "n"), ("Ġ", "s"),
    ("Ã", "©"), ("in", "g"), ("Ġ", "c"), ("a", "t"), ("Ġc", "at"),
]  # fmt: skip
TEXTS = [
    "the cat is singing in the café", " naïve  \tre\u00adtheatre 123!", "on — the…",
    "日本 the\u2028 \x85cat",
]  # fmt: skip
PIECES = [*bytes_to_unicode().values(), *map("".join, MERGES), "<|endoftext|>"]  # in GPT-2's order
GPT2_ROWS = len(PIECES)
# BART's order is another one, with entries that pad the vocabulary; <mask> is the last.
BART_PIECES = ["<s>", "<pad>", "</s>", "<unk>", *sorted(PIECES), "madeupword0000", "madeupword0001"]
MASK_ROW = len(BART_PIECES)


def write_tokenizer(folder: Path, pieces: list[str]) -> None:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


SPREADS = {"bias": 0.05, "embed_positions": 1.0, "wpe": 1.0, "shared": 0.3, "embed_tokens": 0.3, "wte": 0.3,
           "lm_head": 0.3, "encoder_attn": 0.5}  # fmt: skip


def shake(model, seed: int = 7):
    """Weights that make a difference everywhere (new models have biases of zero and gains of one), and with
    which a model says different things."""
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        spread = next((spread for part, spread in SPREADS.items() if part in name), 0.12)
        parameter.data = is_gain + spread * torch.randn(parameter.shape, generator=noise)
    return model.eval()


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=GPT2_ROWS, n_embd=32, n_layer=3, n_head=4, n_positions=40,
        bos_token_id=GPT2_ROWS - 1, eos_token_id=GPT2_ROWS - 1, **options,
    )  # fmt: skip
    return shake(transformers.GPT2LMHeadModel(config))


def far_below_zero(model):
    """Logits lower by 60, for a part that all words have in common. The real GPT-2 has such logits."""
    words, norm = model.transformer.wte.weight.data, model.transformer.ln_f
    norm.bias.data.fill_(5.0)
    words -= words.mean(dim=1, keepdim=True) + 60 / norm.bias.sum()
    return model


def without_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    return model


def bart(**options):
    config = transformers.BartConfig(
        **{
            "vocab_size": MASK_ROW, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
            "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
            "decoder_attention_heads": 8, "max_position_embeddings": 40, **options,
        }
    )  # fmt: skip
    return shake(transformers.BartForConditionalGeneration(config))


def save(model, folder: Path, **options) -> Path:
    """A folder as `save_pretrained` and the released models have it."""
    model.save_pretrained(folder, **options)
    is_bart = model.config.model_type == "bart"
    write_tokenizer(folder, [*BART_PIECES, "<mask>"] if is_bart else PIECES)
    return folder


# --- mBART, M2M-100, NLLB ------------------------------------------------------------------------

LANGUAGES = transformers.models.mbart.tokenization_mbart.FAIRSEQ_LANGUAGE_CODES
LANGUAGES_50 = transformers.models.mbart50.tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES
NLLB_LANGUAGES = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES


def train_sentencepiece(path: Path, texts: list[str], kind: str = "unigram") -> list[str]:
    """A model of SentencePiece with mBART's first pieces; returns all pieces."""
    import sentencepiece

    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=200, hard_vocab_limit=False,
            minloglevel=2, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, model_type=kind,
        )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(number) for number in range(model.vocab_size())]


def translation_model(kind: str, rows: int, **options):
    """kind: `MBart`, or `M2M100`, which is also the class of NLLB's dense models."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=rows, d_model=32, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=48, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=8, max_position_embeddings=60, scale_embedding=True,
        **options,
    )  # fmt: skip
    return shake(getattr(transformers, f"{kind}ForConditionalGeneration")(config), seed=7 if kind == "MBart" else 16)


def save_mbart(folder: Path, texts: list[str], languages: list[str], change, **options) -> Path:
    """texts: for SentencePiece to learn from; languages: the codes that the model has; change: of its weights."""
    folder.mkdir(parents=True)
    pieces = train_sentencepiece(folder / "sentencepiece.bpe.model", texts)
    change(translation_model("MBart", 1 + len(pieces) + len(languages) + 1, **options)).save_pretrained(folder)
    return folder


def save_m2m100(folder: Path, texts: list[str], change) -> Path:
    """With pieces in an order of their own, and rows without a token behind the languages, as in the release."""
    folder.mkdir(parents=True)
    pieces = train_sentencepiece(folder / "sentencepiece.bpe.model", texts, "bpe")
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces[3:])]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(vocabulary)}))
    change(translation_model("M2M100", len(vocabulary) + 100 + 8)).save_pretrained(folder)
    return folder


def save_nllb(folder: Path, texts: list[str], change, **tokenizer) -> Path:
    """tokenizer: of tokenizer_config.json. Two rows have no token, as in the release."""
    folder.mkdir(parents=True)
    pieces = train_sentencepiece(folder / "sentencepiece.bpe.model", texts, "bpe")
    change(translation_model("M2M100", 1 + len(pieces) + len(NLLB_LANGUAGES) + 1 + 2)).save_pretrained(folder)
    settings = {"tokenizer_class": "NllbTokenizer", **tokenizer}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    fast = transformers.NllbTokenizer.from_pretrained(folder, extra_special_tokens=[])
    content = json.loads(fast.backend_tokenizer.to_str())
    [*special, mask] = content["added_tokens"]  # this release of Transformers adds <mask> before languages, not behind
    added = [{**special[0], "id": 1 + len(pieces) + n, "content": code} for n, code in enumerate(NLLB_LANGUAGES)]
    content["added_tokens"] = [*special, *added, {**mask, "id": 1 + len(pieces) + len(added)}]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
