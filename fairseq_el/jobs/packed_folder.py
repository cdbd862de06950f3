"""Writes a packed model folder from any model: settings and vocabulary as they were, weights packed."""

import shutil
from pathlib import Path
from typing import Any

import torch

from fairseq_el.checkpoints import packed_file
from fairseq_el.checkpoints.format import atomic_file, current_state, optimizer_history
from fairseq_el.checkpoints.huggingface.writing import untrained, write_vocabulary
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from fairseq_el.jobs.default_preset import default_preset, settings_of
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.model_loading import load_model
from fairseq_el.models import packed
from fairseq_el.models.conversion import is_accelerated


def write_packed(
    source: str | Path, output: Path, precision: str = "auto", bpe_dir: str | Path | None = None
) -> Path:
    """source, bpe_dir: what `--model` and `--bpe-dir` take. Returns the file of the weights.

    The checkpoint is written last: without it the folder is not a model.
    """
    files = ModelFiles.find(source, bpe_dir)
    if output.resolve() == files.checkpoint.resolve() or output.resolve() == files.checkpoint.parent.resolve():
        raise UserError(f"{output} has the model itself: give another folder to write to")
    preset = presets.load(default_preset(files)).changed(el_precision=precision)
    task, model = load_model(files, preset, stock=False, fp16=False, cpu=True)
    if not is_accelerated(model):
        raise UserError(f"{files.checkpoint} has no EL form (it lacks fairseq's Transformer decoder): use it as it is")
    output.mkdir(parents=True, exist_ok=True)
    checkpoint, weights = output / "model.pt", output / packed_file.NAME
    checkpoint.unlink(missing_ok=True)
    digest = packed.store(model, precision, weights)
    copy_vocabulary(files, output)
    with atomic_file(checkpoint) as file:
        torch.save(settings(files) | {"model": {packed_file.MARKER: digest}}, file)
    return weights


def copy_vocabulary(files: ModelFiles, output: Path) -> None:
    if files.huggingface:
        write_vocabulary(files.huggingface, output)
        return
    for path in (*files.checkpoint.parent.glob("dict*.txt"), *files.encoding):
        shutil.copyfile(path, output / path.name)


def settings(files: ModelFiles) -> dict[str, Any]:
    """The rest of the checkpoint, as far as fairseq needs it to build the model."""
    if files.huggingface:
        return untrained(current_state(files.huggingface.configuration(), {}))
    saved = settings_of(files.checkpoint)
    history = saved.get("optimizer_history") or optimizer_history()
    return {"args": saved.get("args"), "cfg": saved.get("cfg"), "optimizer_history": history, "extra_state": {}}
