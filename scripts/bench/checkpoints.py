"""The checkpoint that all systems run: made once from a seed, and converted for each peer."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import BUILD, SCRIPTS, peers_python

SPECIAL_SYMBOLS = 4  # fairseq's <s> <pad> </s> <unk>, which dictionary files don't list


@dataclass(frozen=True)
class Checkpoint:
    """Seeded random weights in the shapes of a stock architecture, kept under build/ between
    runs."""

    arch: str
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    vocabulary: int = 50264
    seed: int = 1

    @property
    def folder(self) -> Path:
        """Named after what determines the contents, so that a change of settings is never
        overlooked."""
        settings = {"vocabulary": self.vocabulary, "seed": self.seed, **self.overrides}
        name = ",".join([self.arch, *(f"{name}={value}" for name, value in settings.items())])
        if len(name) > 200:  # file systems end at 255
            name = f"{name[:180]},{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return BUILD / "checkpoints" / name

    @property
    def model(self) -> Path:
        return self.folder / "model.pt"

    @property
    def data(self) -> Path:
        """The folder with the dictionaries."""
        return self.folder

    @property
    def converted(self) -> Path:
        return self.folder / "peers"

    def ensure(self) -> None:
        """Writes the checkpoint unless an earlier run did."""
        maker = SCRIPTS / "make_checkpoint.py"
        digest = hashlib.sha256(maker.read_bytes()).hexdigest()
        stamp = self.folder / "maker"  # written last, so that a broken run leaves none
        if stamp.exists() and stamp.read_text() == digest:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"making a checkpoint in the shapes of {self.arch}", flush=True)
        command = [sys.executable, str(maker), "--arch", self.arch]
        command += ["--output", str(self.folder), "--seed", str(self.seed)]
        command += ["--vocab", str(self.vocabulary)]
        for name, value in self.overrides.items():
            command += ["--set", f"{name}={value}"]
        subprocess.run(command, check=True)
        stamp.write_text(digest)

    def ensure_converted(self) -> None:
        """Converts the checkpoint for the peers unless an earlier run did."""
        stamp = self.converted / "done"
        if stamp.exists():
            return
        shutil.rmtree(self.converted, ignore_errors=True)
        self.converted.mkdir()
        print("converting the checkpoint for the systems to compare with", flush=True)
        weights, config = self.converted / "weights.pt", self.converted / "config.json"
        write_huggingface_weights(self.model, weights, config)
        subprocess.run(
            [peers_python(), "-m", "bench.convert", str(weights), str(config), str(self.converted)],
            check=True,
            cwd=SCRIPTS,
        )
        weights.unlink()
        stamp.touch()


@dataclass(frozen=True)
class Released(Checkpoint):
    """A checkpoint that is there already, with its dictionary beside it."""

    path: str = ""

    @classmethod
    def at(cls, path: Path) -> "Released":
        from fairseq_el.errors import UserError

        dictionary = path.parent / "dict.txt"
        for file in (path, dictionary):
            if not file.is_file():
                raise UserError(f"there is no {file}: --path takes a checkpoint that has its dict.txt beside it")
        words = len(dictionary.read_text(encoding="utf-8").splitlines())
        return cls("released", vocabulary=words + SPECIAL_SYMBOLS, path=str(path.resolve()))

    @property
    def folder(self) -> Path:
        """For what is made of it. Named after path and time, so that another file is never overlooked."""
        name = f"{self.path} {Path(self.path).stat().st_mtime}"
        return BUILD / "checkpoints" / f"released-{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    @property
    def model(self) -> Path:
        return Path(self.path)

    def ensure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("dict.txt", "dict.source.txt", "dict.target.txt"):
            shutil.copyfile(self.model.with_name("dict.txt"), self.folder / name)


def write_huggingface_weights(model: Path, weights: Path, config: Path) -> None:
    """Renames the weights here, where fairseq's checkpoints can be read; the rest needs the
    peers."""
    import torch
    from fairseq import checkpoint_utils

    import fairseq_el.checkpoints.loading  # noqa: F401  lets torch load a released checkpoint's Namespace
    from bench.gpt2_weights import gpt2_to_huggingface
    from fairseq_el.checkpoints.huggingface import bart_to_huggingface

    state = checkpoint_utils.load_checkpoint_to_cpu(str(model))
    cfg = state["cfg"]["model"]
    rename = gpt2_to_huggingface if "transformer_lm" in cfg._name else bart_to_huggingface
    renamed, settings = rename(state["model"], cfg)
    torch.save(renamed, weights)
    config.write_text(json.dumps(settings, indent=2))
