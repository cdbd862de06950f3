"""The files of a model: where they are, and a digest of them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

from fairseq_el.errors import UserError
from fairseq_el.resources import resource
from fairseq_el.text.vocabulary import load_encoding

SENTENCEPIECE_FILES = ("sentencepiece.model", "sentencepiece.bpe.model")
GPT2_FILES = ("encoder.json", "vocab.bpe")


@dataclass(frozen=True)
class ModelFiles:
    checkpoint: Path
    encoding: tuple[Path, ...]  # one file of SentencePiece, or two of GPT-2's encoding

    @classmethod
    def find(cls, model: str | Path, encoding: str | Path | None = None) -> "ModelFiles":
        """model: a folder, a checkpoint in one, or `demo`; encoding: where that is, if not in the folder."""
        path = Path(model)
        if not path.exists() and str(model) == "demo":
            path = resource("demo")
        checkpoint = path / "model.pt" if path.is_dir() else path
        if not checkpoint.is_file():
            raise UserError(
                f"there is no checkpoint {checkpoint}: give a folder with a model.pt, or the file itself"
            )
        return cls(checkpoint, find_encoding(Path(encoding) if encoding else checkpoint.parent))

    def dictionary(self, side: str) -> Path:
        """side: `source` or `target`, or the name of a language."""
        for name in (f"dict.{side}.txt", "dict.txt"):
            if (self.checkpoint.parent / name).is_file():
                return self.checkpoint.parent / name
        raise UserError(
            f"{self.checkpoint.parent} has no dict.{side}.txt or dict.txt: put the one that came with the "
            "checkpoint there"
        )

    def digest(self) -> str:
        """Of all that summaries depend on."""
        whole = hashlib.sha256()
        for path in (self.checkpoint, *sorted(self.checkpoint.parent.glob("dict*.txt")), *self.encoding):
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    whole.update(part)
        return whole.hexdigest()

    def build_encoding(self) -> SentencepieceBPE | GPT2BPE:
        return load_encoding(self.encoding)


def find_encoding(place: Path) -> tuple[Path, ...]:
    """place: a folder, or a file of SentencePiece."""
    if place.is_file():
        return (place,)
    for names in (*((name,) for name in SENTENCEPIECE_FILES), GPT2_FILES):
        files = tuple(place / name for name in names)
        if all(file.is_file() for file in files):
            return files
    raise UserError(
        f"{place} has neither {SENTENCEPIECE_FILES[0]} nor {' and '.join(GPT2_FILES)}, which turn text into "
        "what the model reads: put them there, or name their folder (--bpe)"
    )
