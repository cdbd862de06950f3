"""The files of a model: where they are, what is in them beside the weights, and a digest of them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from fairseq_el.checkpoints import loading, packed_file
from fairseq_el.checkpoints.huggingface import HuggingFaceFolder, is_huggingface
from fairseq_el.checkpoints.huggingface.reading import CONFIG, TOKENIZER
from fairseq_el.errors import UserError
from fairseq_el.resources import resource
from fairseq_el.text.vocabulary import Encoding, build_dictionary, gpt2_encoding, load_dictionary, load_encoding

SENTENCEPIECE_FILES = (
    "sentencepiece.model", "sentencepiece.bpe.model",
    "sentence.bpe.model", "spm.128k.model",  # in fairseq's releases of mBART and M2M-100
)  # fmt: skip
DICTIONARIES = ("dict.txt", "model_dict.128k.txt")
SETTINGS = ("*dict*.txt", "*langs.txt", "language_pairs*.txt")  # dictionaries, and lists of languages
GPT2_FILES = ("encoder.json", "vocab.bpe")


@dataclass(frozen=True)
class ModelFiles:
    """A fairseq checkpoint with its dictionaries and encoding, or a Hugging Face folder."""

    checkpoint: Path  # the file, or the folder
    encoding: tuple[Path, ...]  # one file of SentencePiece, two of GPT-2's encoding, or tokenizer.json

    @classmethod
    def find(cls, model: str | Path, encoding: str | Path | None = None) -> "ModelFiles":
        """model: a folder of either kind, a checkpoint, or `demo`; encoding: its folder, if not the model's."""
        path = Path(model)
        if not path.exists() and str(model) == "demo":
            path = resource("demo")
        checkpoint = path / "model.pt" if path.is_dir() else path
        if not checkpoint.is_file() and is_huggingface(path):
            return cls(path, HuggingFaceFolder(path, Path(encoding) if encoding else None).tokenizer)
        if not checkpoint.is_file() and path.is_dir():
            raise UserError(
                f"{path} has neither a model.pt, as fairseq's models have, nor a {CONFIG}, as Hugging Face's have: "
                "give the folder of a model, or its checkpoint"
            )
        if not checkpoint.is_file():
            raise UserError(f"there is no checkpoint {path}: give the folder of a model, its checkpoint, or demo")
        return cls(checkpoint, find_encoding(Path(encoding) if encoding else checkpoint.parent))

    @cached_property
    def huggingface(self) -> HuggingFaceFolder | None:
        """None for a fairseq checkpoint."""
        if not self.checkpoint.is_dir():
            return None
        files = self.encoding
        return HuggingFaceFolder(self.checkpoint, files[0] if len(files) == 1 else files[0].parent)

    def load_state(self) -> dict[str, Any]:
        return loading.load(self.huggingface or self.checkpoint)

    def dictionary(self, side: str) -> Path:
        """The file of a fairseq model. side: `source` or `target`, or the name of a language."""
        if self.huggingface:
            raise UserError(
                f"{self.checkpoint} is a Hugging Face folder, and fairseq's own commands need a checkpoint: make one "
                "with fairseq-el convert"
            )
        for name in (f"dict.{side}.txt", *DICTIONARIES):
            if (self.checkpoint.parent / name).is_file():
                return self.checkpoint.parent / name
        raise UserError(
            f"{self.checkpoint.parent} has no dict.{side}.txt or dict.txt: put the one that came with the "
            "checkpoint there"
        )

    def load_dictionary(self, side: str) -> Dictionary:
        if self.huggingface:
            return build_dictionary(self.huggingface.symbols)
        return load_dictionary(self.dictionary(side))

    def build_encoding(self) -> Encoding:
        if self.huggingface and not self.huggingface.is_multilingual:
            return gpt2_encoding(*self.huggingface.bpe, self.encoding)
        return load_encoding(self.encoding)

    def size(self) -> int:
        """Bytes of the weights on the disk."""
        return self.huggingface.size() if self.huggingface else packed_file.size(self.checkpoint)

    def digest(self) -> str:
        """Of all that summaries depend on."""
        whole = hashlib.sha256()
        for path in self._all():
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    whole.update(part)
        return whole.hexdigest()

    def _all(self) -> list[Path]:
        if self.huggingface:
            return self.huggingface.files()
        packed = filter(Path.is_file, [self.checkpoint.with_name(packed_file.NAME)])
        beside = sorted(path for pattern in SETTINGS for path in self.checkpoint.parent.glob(pattern))
        return [self.checkpoint, *packed, *dict.fromkeys(beside), *self.encoding]


def find_encoding(place: Path) -> tuple[Path, ...]:
    """place: a folder, or a file of SentencePiece."""
    if place.is_file():
        return (place,)
    for names in (*((name,) for name in SENTENCEPIECE_FILES), GPT2_FILES, (TOKENIZER,)):
        files = tuple(place / name for name in names)
        if all(file.is_file() for file in files):
            return files
    raise UserError(
        f"{place} has neither {SENTENCEPIECE_FILES[0]} nor {' and '.join(GPT2_FILES)}, which turn text into "
        "tokens: put them there, or name their folder (--bpe-dir)"
    )
