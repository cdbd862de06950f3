"""One folder as `save_pretrained` of Transformers writes it, seen as a fairseq model."""

from argparse import Namespace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_el.checkpoints import validation
from fairseq_el.checkpoints.format import configuration, quiet, training_args
from fairseq_el.checkpoints.huggingface import bart, gpt2, reading, vocabularies
from fairseq_el.checkpoints.huggingface.weights import ConvertedWeights, Weights
from fairseq_el.errors import UserError

KINDS = {"bart": bart, "mbart": bart, "gpt2": gpt2}  # by `model_type`
ARCHITECTURES = {"bart": "bart_large", "mbart": "mbart_large", "gpt2": "transformer_lm_gpt"}


def is_huggingface(path: Path) -> bool:
    return (path / reading.CONFIG).is_file()


class HuggingFaceFolder:
    """A BART, mBART or GPT-2. What is wrong with its files is said by a `UserError`, when they are needed."""

    def __init__(self, path: Path, tokenizer: Path | None = None):
        """tokenizer: the folder of the tokenizer's files, or its one file, if not in the same folder."""
        self.path = path
        config = reading.read_json(path / reading.CONFIG)
        self.kind = str(config.get("model_type"))
        if self.kind not in KINDS:
            raise UserError(
                f"{path} holds a model of type {self.kind[:40]!r}, which fairseq has no counterpart for: use one of "
                f"the types {', '.join(KINDS)}"
            )
        self.config = KINDS[self.kind].checked(config)
        self.tokenizer = reading.find_tokenizer(tokenizer or path, self.kind)

    # --- files

    @property
    def task(self) -> str:
        return "language_modeling" if self.kind == "gpt2" else "translation"

    def weight_files(self) -> list[Path]:
        return reading.weight_files(self.path)

    def size(self) -> int:
        """Bytes of the weights on the disk."""
        return sum(file.stat().st_size for file in self.weight_files())

    def files(self) -> list[Path]:
        """All that the output depends on."""
        settings = [self.path / name for name in (reading.CONFIG, "generation_config.json", "tokenizer_config.json")]
        return [*filter(Path.is_file, settings), *self.weight_files(), *self.tokenizer]

    def _read_if_present(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return reading.read_json(path) if path.is_file() else {}

    # --- vocabulary

    @cached_property
    def bpe(self) -> tuple[dict[str, int], reading.Merges]:
        """Of BART and GPT-2: tokens and merges of GPT-2's byte-pair encoding, as fairseq's `encoder.json` and
        `vocab.bpe` have them."""
        vocabulary, merges = reading.read_bpe(self.tokenizer)
        return (vocabulary if self.kind == "gpt2" else vocabularies.gpt2_encoder(merges)), merges

    @cached_property
    def symbols(self) -> list[str]:
        """fairseq's dictionary without the special symbols."""
        rows = self.config["vocab_size"]
        if self.kind == "mbart":
            symbols = vocabularies.mbart_symbols(self._mbart_vocabulary(rows), rows)
        elif self.kind == "gpt2":
            symbols = vocabularies.gpt2_symbols(self.bpe[0], rows, gpt2.end_of_text(self.config))
        else:
            symbols = vocabularies.bart_symbols(*reading.read_bpe(self.tokenizer), rows)
        if len({*symbols, *vocabularies.SPECIAL_SYMBOLS}) < len(symbols) + len(vocabularies.SPECIAL_SYMBOLS):
            raise UserError(f"{self.tokenizer[0]} has a token twice: copy or download it again")
        return symbols

    def _mbart_vocabulary(self, rows: int) -> dict[str, int]:
        combined = self.tokenizer[0].parent / reading.TOKENIZER
        if combined.is_file():
            return reading.read_unigram(combined)
        return vocabularies.mbart_vocabulary(self.tokenizer[0], rows)

    # --- the model

    def state(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The weights and the settings of model and task, as in a fairseq checkpoint.

        The weights are converted when they are iterated over.
        dtype: of the weights (None: half precision if they are stored so, else single).
        """
        kind = KINDS[self.kind]
        weights = Weights(reading.open_weights(self.path), kind.PREFIX, dtype)
        args = self._arguments()
        validation.check_settings(args, self.size())
        task = {"_name": self.task, **self._text_format()}
        cfg = OmegaConf.create({"task": task, "model": args}, flags={"allow_objects": True})
        convert = partial(kind.convert, config=self.config)
        return {"args": None, "cfg": cfg, "model": ConvertedWeights(convert, weights)}

    def configuration(self) -> DictConfig:
        """All settings that a checkpoint has."""
        with quiet():
            cfg = configuration(self._arguments())
        with open_dict(cfg.task):
            cfg.task.update(self._text_format())
        return cfg

    def _arguments(self) -> Namespace:
        architecture = ARCHITECTURES[self.kind]
        with quiet():
            args = training_args(architecture, self.task, seed=1, settings=KINDS[self.kind].settings(self.config))
        args._name = architecture
        return args

    def _text_format(self) -> dict[str, str | None]:
        """How Transformers frames sources and starts targets, in the dictionary's symbols; see `plugin.text_format`."""
        if self.kind == "gpt2":
            return {}
        config = self.config | self._read_if_present("generation_config.json")
        forced = self._symbol(config.get("forced_bos_token_id"))
        if self.kind == "bart":
            sides = {"source_lang": "source", "target_lang": "target"}
            return {**sides, "source_format": "<s> {text} </s>", "target_start": f"</s> {forced}" if forced else "</s>"}
        tokenizer = self._read_if_present("tokenizer_config.json")
        first = self._symbol(config.get("decoder_start_token_id"))
        targets = map(self._language, (forced, first, f"[{tokenizer.get('tgt_lang')}]"))
        languages = {
            "source_lang": self._language(f"[{tokenizer.get('src_lang')}]"),
            "target_lang": next(filter(None, targets), None),
        }
        starts_with_end = first == "</s>"
        is_mbart50 = str(tokenizer.get("tokenizer_class", "MBart50" if starts_with_end else "")).startswith("MBart50")
        return {
            **languages,
            "source_format": "{source_lang} {text} </s>" if is_mbart50 else "{text} </s> {source_lang}",
            "target_start": "</s> {target_lang}" if starts_with_end else "{target_lang}",
        }

    def _symbol(self, index: Any) -> str | None:
        symbols = [*vocabularies.SPECIAL_SYMBOLS, *self.symbols]
        return symbols[index] if type(index) is int and 0 <= index < len(symbols) else None

    def _language(self, symbol: str | None) -> str | None:
        """The language that a symbol of the dictionary stands for."""
        code = (symbol or "")[1:-1]
        return code if symbol in self.symbols and vocabularies.LANGUAGE.fullmatch(code) else None
