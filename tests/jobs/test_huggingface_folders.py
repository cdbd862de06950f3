"""A Hugging Face folder is a model: the same outputs as in Transformers, and as of its converted checkpoint."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fairseq_el import Summarizer
from fairseq_el.checkpoints import loading
from fairseq_el.cli.convert import convert
from fairseq_el.errors import UserError
from fairseq_el.jobs.model_files import ModelFiles
from helpers import DEMO, run_command
from hf_models import LANGUAGES, LANGUAGES_50, bart, gpt2, save, save_m2m100, save_mbart, save_nllb

transformers = pytest.importorskip("transformers")

TEXTS = [
    "the cat sings", "on the theatre", "he sat on a hat", "in sicher re", "café, on 12", "red thing", "a tea in the",
    "cats, then hats",
]  # fmt: skip
SIDES = {  # languages as the models have them, and tokenizers of Transformers
    "mbart": ("en_XX", "ro_RO", "MBart"),
    "mbart50": ("en_XX", "ro_RO", "MBart50"),
    "m2m100": ("en", "ro", "M2M100"),
    "nllb": ("eng_Latn", "ron_Latn", "Nllb"),
    "nllb, legacy": ("eng_Latn", "ron_Latn", "Nllb"),
}
NAMES = ["gpt2", "bart", "bart, first token forced", "distilbart", *SIDES]


def ending(model):
    """With outputs that end by themselves: where they are cut off, fairseq and Transformers score differently."""
    kind = model.config.model_type
    last = {
        "gpt2": lambda: model.transformer.ln_f,
        "bart": lambda: model.model.decoder.layers[-1].final_layer_norm,
        "mbart": lambda: model.model.decoder.layer_norm,
        "m2m_100": lambda: model.model.decoder.layer_norm,
    }[kind]()
    row = model.get_input_embeddings().weight.data[model.config.eos_token_id]
    row.copy_(last.bias.data / last.bias.data.square().sum())
    return model


def starting(model):
    """As bart-large-cnn, which is made to begin with <s>."""
    model.generation_config.forced_bos_token_id = 0
    return model


def longest(name: str) -> int:
    """Tokens of an output, such that it fits in the model's positions."""
    return 12 if name == "gpt2" else 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of models, each made once."""
    learned_from = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:200]
    makers = {
        "gpt2": lambda folder: save(ending(gpt2()), folder),
        "bart": lambda folder: save(ending(bart()), folder),
        "bart, first token forced": lambda folder: save(starting(ending(bart())), folder),
        "distilbart": lambda folder: save(ending(bart(encoder_layers=4, decoder_layers=1)), folder),
        "mbart": lambda folder: save_mbart(folder, learned_from, LANGUAGES, ending),
        "mbart50": lambda folder: save_mbart(folder, learned_from, LANGUAGES_50, ending, decoder_start_token_id=2),
        "m2m100": lambda folder: save_m2m100(folder, learned_from, ending),
        "nllb": lambda folder: save_nllb(folder, learned_from, ending),
        "nllb, legacy": lambda folder: save_nllb(folder, learned_from, ending, legacy_behaviour=True),
    }
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = makers[name](tmp_path_factory.mktemp("model") / "hf")
        return made[name]

    return make


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(model: Path, name: str, search: str = "beam", **options) -> Summarizer:
        preset = {"max_len_b": longest(name), "searches": {"beam": {"beam": 4}, "greedy": {"beam": 1}}}
        if name == "gpt2":
            preset |= {"task": "language_modeling", "max_new_tokens": longest(name), "el_unscored_prompts": True}
        path = tmp_path_factory.mktemp("preset") / "preset.yaml"
        path.write_text(json.dumps(preset))
        languages = dict(zip(("source_lang", "target_lang"), SIDES[name])) if name in SIDES else {}
        return Summarizer.load(model, path, search, **{**languages, **options})

    return load


def transformers_model(folder: Path, name: str):
    """The model, each text's tokens, and what to generate with, by Transformers alone."""
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        end, tokenizer = model.config.eos_token_id, transformers.GPT2Tokenizer.from_pretrained(folder)
        # fairseq's language models begin with the end of a text
        return model, [[end, *tokenizer(text)["input_ids"]] for text in TEXTS], {"pad_token_id": end}
    options = {"suppress_tokens": [1], "min_new_tokens": 1}  # fairseq never takes padding, nor the end at once
    if name not in SIDES:
        model, tokenizer = (
            kind.from_pretrained(folder)
            for kind in (transformers.BartForConditionalGeneration, transformers.BartTokenizer)
        )
    else:
        source, target, kind = SIDES[name]
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        tokenizer = getattr(transformers, f"{kind}Tokenizer").from_pretrained(folder, src_lang=source, tgt_lang=target)
        code = tokenizer.convert_tokens_to_ids(f"__{target}__" if name == "m2m100" else target)
        options["decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"] = code
    return model, [tokenizer(text)["input_ids"] for text in TEXTS], options


def transformers_writes(folder: Path, name: str, beam: int) -> list[list[int] | None]:
    """The tokens of each output, without the special ones it begins and ends with; None for those cut off."""
    model, prompts, options = transformers_model(folder, name)
    special = 1 if name in ("gpt2", "bart", "distilbart", "mbart") else 2
    written: list[list[int] | None] = []
    for prompt in prompts:
        source = torch.tensor([prompt])
        found = model.generate(
            source, attention_mask=torch.ones_like(source), num_beams=beam, num_return_sequences=beam, do_sample=False,
            early_stopping=beam > 1, length_penalty=1.0, max_new_tokens=longest(name), forced_eos_token_id=None,
            **options,
        )[:, len(prompt) if name == "gpt2" else special :].tolist()  # fmt: skip
        end = model.config.eos_token_id
        best = found[0]
        written.append(best[: best.index(end)] if all(end in tokens for tokens in found) else None)
    return written


def ours(summarize: Summarizer, name: str) -> list[list[int]]:
    """The same, of the summarizer, in Transformers' numbers."""
    found, step = [], summarize.task.inference_step

    def watch(*args, **kwargs):
        result = step(*args, **kwargs)
        found.append(result[0][0]["tokens"].tolist()[:-1])
        return result

    summarize.task.inference_step = watch
    for text in TEXTS:
        summarize([text])
    del summarize.task.inference_step
    if name != "gpt2":
        return found
    prompts = [len(summarize.batcher.encode(text).tokens) for text in TEXTS]
    dictionary = summarize.task.target_dictionary
    return [[int(dictionary[token]) for token in tokens[n:]] for tokens, n in zip(found, prompts, strict=True)]


@pytest.mark.parametrize("search, beam", [("greedy", 1), ("beam", 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_the_tokens_that_transformers_gives(folders, load, name, search, beam):
    expected = transformers_writes(folders(name), name, beam)
    for stock in (False, True) if beam > 1 and name != "gpt2" else (False,):
        found = ours(load(folders(name), name, search, stock=stock), name)
        compared = [pair for pair in zip(found, expected, strict=True) if pair[1] is not None]
        assert all(one == other for one, other in compared)
    assert len({tuple(tokens) for tokens, _ in compared}) > 2
    assert max(len(set(tokens)) for tokens, _ in compared) > 2


# --- the same as the converted checkpoint --------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bart, first token forced", *SIDES])
def test_a_folder_and_its_converted_checkpoint_are_one_model(folders, load, tmp_path, name):
    convert(folders(name), tmp_path / "fairseq")
    direct, converted = load(folders(name), name), load(tmp_path / "fairseq", name)
    theirs = converted.model.state_dict()
    assert direct.model.state_dict().keys() == theirs.keys()
    for weight_name, weight in direct.model.state_dict().items():
        assert torch.equal(weight, theirs[weight_name]), weight_name
    assert direct.task.source_dictionary == converted.task.source_dictionary
    assert direct(TEXTS) == converted(TEXTS)
    assert len(set(direct(TEXTS))) > 3


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_in_low_precision_are_the_same_numbers(load, tmp_path, stored):
    folder = save(ending(bart()).to(stored), tmp_path / "hf")
    convert(folder, tmp_path / "fairseq")
    assert load(folder, "bart")(TEXTS) == load(tmp_path / "fairseq", "bart")(TEXTS)


def test_a_long_text_is_cut_to_leave_room_for_special_tokens(folders, load):
    for name in ("bart", *SIDES):
        summarize = load(folders(name), name)
        positions = summarize.model.max_positions()[0]
        assert summarize.batcher.longest_text == positions - 2
        assert summarize(["the cat sings on " * 30])[0]


def test_damaged_settings_of_special_tokens_are_refused_in_one_line(folders, load, tmp_path):
    path = convert(folders("bart"), tmp_path)
    state = torch.load(path, weights_only=True)
    for damage in ({"source_format": "<s> </s>"}, {"source_format": 3}, {"target_start": ""}):
        torch.save(state | {"cfg": state["cfg"] | {"task": state["cfg"]["task"] | damage}}, path)
        with pytest.raises(UserError, match="source_format and target_start are damaged: get it again"):
            load(path, "bart")


# --- files ---------------------------------------------------------------------------------------


def with_tokenizer_json(folder: Path, name: str) -> None:
    """As newer folders are, without the files of slow tokenizers."""
    kind = {"gpt2": "GPT2", "bart": "Bart", "mbart50": "MBart50", "nllb": "Nllb"}[name]
    getattr(transformers, f"{kind}Tokenizer").from_pretrained(folder).save_pretrained(folder)
    for file in ("vocab.json", "merges.txt", "sentencepiece.bpe.model"):
        (folder / file).unlink(missing_ok=True)
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["bart", "gpt2", "mbart50", "nllb"])
def test_a_tokenizer_json_does_as_well(folders, load, tmp_path, name):
    folder = shutil.copytree(folders(name), tmp_path / "hf")
    with_tokenizer_json(folder, name)
    assert load(folder, name)(TEXTS) == load(folders(name), name)(TEXTS)


def test_the_languages_of_nllb_are_known_without_a_tokenizer_json(folders, load, tmp_path):
    folder = shutil.copytree(folders("nllb"), tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    assert load(folder, "nllb")(TEXTS) == load(folders("nllb"), "nllb")(TEXTS)


def test_the_digest_is_of_all_that_outputs_depend_on(folders, tmp_path):
    folder = shutil.copytree(folders("bart"), tmp_path / "hf")
    digests = {ModelFiles.find(folder).digest()}
    (folder / "README.md").write_text("about the model")
    assert ModelFiles.find(folder).digest() in digests
    for name in ("config.json", "generation_config.json", "model.safetensors", "vocab.json", "merges.txt"):
        with (folder / name).open("ab") as file:
            file.write(b"\n")
        digests.add(ModelFiles.find(folder).digest())
    assert len(digests) == 6


def test_the_command_takes_a_folder(folders, tmp_path):
    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n")
    command = [
        sys.executable, "-m", "fairseq_el", "summarize", "--model", folders("bart"), "--preset", "demo",
        "--input", "texts", "--output", "out", "--cpu",
    ]  # fmt: skip
    done = run_command(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out").read_text().splitlines()) == len(TEXTS)


# --- languages -----------------------------------------------------------------------------------


def change_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", ["mbart", "mbart50"])
def test_languages_are_taken_from_the_folder(folders, load, tmp_path, name):
    folder = shutil.copytree(folders(name), tmp_path / "hf")
    change_json(folder / "tokenizer_config.json", src_lang="en_XX", tgt_lang="ro_RO")
    unnamed = {"source_lang": None, "target_lang": None}
    assert load(folder, name, **unnamed)(TEXTS) == load(folders(name), name)(TEXTS)
    romanian = loading.load(folder)["cfg"].task.target_lang
    code = ModelFiles.find(folder).load_dictionary("source").index(f"[{romanian}]")
    (folder / "tokenizer_config.json").unlink()
    where = "forced_bos_token_id" if name == "mbart50" else "decoder_start_token_id"
    change_json(folder / "generation_config.json", **{where: code})
    assert load(folder, name, target_lang=None)(TEXTS) == load(folders(name), name)(TEXTS)


def test_a_language_makes_a_difference(folders, load):
    romanian, german = (load(folders("mbart50"), "mbart50", target_lang=code) for code in ("ro_RO", "de_DE"))
    assert romanian(TEXTS) != german(TEXTS)


@pytest.mark.parametrize("chosen", [{"source_lang": None}, {"target_lang": None}, {"target_lang": "xx_XX"}])
def test_a_language_that_is_not_named_or_not_known_is_asked_for(folders, load, chosen):
    [[name, value]] = chosen.items()
    with pytest.raises(UserError, match=f"name one with {name} .*, one of ar_AR, cs_CZ, .*") as refused:
        load(folders("mbart50"), "mbart50", **chosen)
    assert "\n" not in str(refused.value)
    assert value is None or value in str(refused.value)


# --- refusals ------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil_a_weight(folder: Path) -> None:
    model = transformers.BartForConditionalGeneration.from_pretrained(folder)
    model.model.decoder.layers[0].fc1.weight.data[3, 3] = float("nan")
    model.save_pretrained(folder)


MISTAKES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has neither a model.pt, .* nor a config.json"),
    "another model": (lambda folder: change_json(folder / "config.json", model_type="t5"), "type 't5', which .*: use"),
    "no vocabulary": (lambda folder: (folder / "vocab.json").unlink(), "vocab.json does not exist: put the model's"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights, neither"),
    "weights cut short": (lambda folder: cut_short(folder / "model.safetensors"), "is not a complete checkpoint"),
    "merges cut": (lambda folder: (folder / "merges.txt").write_text("#version\n"), "do not make 13 tokens .* again"),
    "sizes": (lambda folder: change_json(folder / "config.json", d_model="32"), "d_model = 32, which is no size"),
    "huge": (lambda folder: change_json(folder / "config.json", encoder_layers=10**9), "don't fit in its"),
    "NaN": (spoil_a_weight, "fc1.weight has NaN or infinite numbers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_damaged_folder_is_refused_in_one_line(folders, load, tmp_path, mistake):
    folder = shutil.copytree(folders("bart"), tmp_path / "hf")
    spoil, message = MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(UserError, match=message) as refused:
        load(folder, "bart")
    assert "\n" not in str(refused.value)


def test_stock_fairseq_does_not_run_a_language_model(folders, load):
    with pytest.raises(UserError, match="leave out --stock"):
        load(folders("gpt2"), "gpt2", stock=True)
