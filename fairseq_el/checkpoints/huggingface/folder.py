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

KINDS = {"bart": bart, "mbart": bart, "m2m_100": bart, "gpt2": gpt2}  # by `model_type`; NLLB's is m2m_100, too
ARCHITECTURES = {
    "bart": "bart_large", "mbart": "mbart_large", "m2m_100": "transformer_wmt_en_de_big",
    "gpt2": "transformer_lm_gpt",
}  # fmt: skip


def is_huggingface(path: Path) -> bool:
    return (path / reading.CONFIG).is_file()


class HuggingFaceFolder:
    """A BART, mBART, M2M-100, NLLB or GPT-2. What is wrong with its files is said by a `UserError`, when they are
    needed."""

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
        vocabularies = [self._beside_tokenizer(name) for name in (reading.VOCABULARY, reading.TOKENIZER)]
        tokenizer = dict.fromkeys([*self.tokenizer, *(vocabularies if self.is_multilingual else ())])
        return [*filter(Path.is_file, settings), *self.weight_files(), *filter(Path.is_file, tokenizer)]

    @property
    def is_multilingual(self) -> bool:
        return self.kind in reading.MULTILINGUAL

    def _beside_tokenizer(self, name: str) -> Path:
        return self.tokenizer[0].parent / name

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
        if self.is_multilingual:
            symbols = vocabularies.multilingual_symbols(self.kind, self._multilingual_vocabulary(rows), rows)
        elif self.kind == "gpt2":
            symbols = vocabularies.gpt2_symbols(self.bpe[0], rows, gpt2.end_of_text(self.config))
        else:
            symbols = vocabularies.bart_symbols(*reading.read_bpe(self.tokenizer), rows)
        if len({*symbols, *vocabularies.SPECIAL_SYMBOLS}) < len(symbols) + len(vocabularies.SPECIAL_SYMBOLS):
            raise UserError(f"{self.tokenizer[0]} has a token twice: copy or download it again")
        return symbols

    def _multilingual_vocabulary(self, rows: int) -> dict[str, int]:
        combined, pieces = map(self._beside_tokenizer, (reading.TOKENIZER, reading.VOCABULARY))
        if combined.is_file():
            return reading.read_pieces(combined)
        if not pieces.is_file():
            return vocabularies.sentencepiece_vocabulary(self.kind, self.tokenizer[0], rows)
        is_wmt21 = self._read_if_present("tokenizer_config.json").get("language_codes") == "wmt21"
        languages = vocabularies.WMT21_LANGUAGES if is_wmt21 else vocabularies.M2M100_LANGUAGES
        vocabulary = reading.checked_vocabulary(reading.read_json(pieces), pieces)
        return vocabularies.m2m100_vocabulary(vocabulary, pieces, languages, rows)

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
        source, target = (
            self._language(vocabularies.language_symbol(self.kind, str(tokenizer.get(name))))
            for name in ("src_lang", "tgt_lang")
        )
        languages = {
            "source_lang": source,
            "target_lang": next(filter(None, (self._language(forced), self._language(first), target)), None),
        }
        starts_with_end = self.kind == "m2m_100" or first == "</s>"
        if self.kind == "m2m_100":
            has_prefix = not tokenizer.get("legacy_behaviour", False)  # an option of NLLB
        else:
            kind = str(tokenizer.get("tokenizer_class", "MBart50" if starts_with_end else ""))
            has_prefix = kind.startswith("MBart50")
        return {
            **languages,
            "source_format": "{source_lang} {text} </s>" if has_prefix else "{text} </s> {source_lang}",
            "target_start": "</s> {target_lang}" if starts_with_end else "{target_lang}",
        }

    def _symbol(self, index: Any) -> str | None:
        symbols = [*vocabularies.SPECIAL_SYMBOLS, *self.symbols]
        return symbols[index] if type(index) is int and 0 <= index < len(symbols) else None

    def _language(self, symbol: str | None) -> str | None:
        """The language that a symbol of the dictionary stands for."""
        return vocabularies.code_of(symbol) if symbol in self.symbols else None
