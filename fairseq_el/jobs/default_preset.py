"""The preset of a model for which none is named."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from fairseq_el.checkpoints import validation
from fairseq_el.errors import UserError, unreadable
from fairseq_el.jobs import multilingual
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.resources import resource

logger = logging.getLogger(__name__)

BY_NAME = {"xsum": "xsum", "cnn": "cnndm"}  # part of the name of a folder or checkpoint, and the preset for it


def default_preset(files: ModelFiles) -> str:
    """`demo` for the demo model, `gpt2_cnndm` for language models, `translation` for models with many languages; for
    others `xsum` or `cnndm` if the name of the folder or of the checkpoint says so (bart.large.cnn), else `plain`: beam
    search without lengths of a data set."""
    folder = (files.checkpoint if files.checkpoint.is_dir() else files.checkpoint.parent).resolve()
    if folder == resource("demo").resolve():
        preset, why = "demo", "the demo model"
    elif (kind := kind_of(files.checkpoint)) == "language model":
        preset, why = "gpt2_cnndm", "a language model"
    elif kind == "multilingual":
        preset, why = "translation", "a model with many languages"
    else:
        name = f"{folder.name} {files.checkpoint.name}".lower()
        preset = next((preset for part, preset in BY_NAME.items() if part in name), "plain")
        why = "an encoder-decoder of that name" if preset != "plain" else "an encoder-decoder"
    logger.info(f"preset {preset}, the default for {why}")
    return preset


def kind_of(checkpoint: Path) -> str:
    """`language model`, `multilingual` or neither. Reads the settings of a checkpoint or a Hugging Face folder, not the
    weights. mBART of Hugging Face may also be a model for summaries."""
    if checkpoint.is_dir():
        model_type = json.loads((checkpoint / "config.json").read_bytes()).get("model_type")
        return {"gpt2": "language model", "m2m_100": "multilingual"}.get(model_type, "")
    task = trained_task(settings_of(checkpoint))
    return "language model" if "language_modeling" in task else "multilingual" if task in multilingual.TASKS else ""


def settings_of(checkpoint: Path) -> dict[str, Any]:
    validation.check_file(checkpoint)
    try:
        try:
            return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 can't be mapped
            return torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise UserError(unreadable(str(checkpoint))) from error


def trained_task(state: Any) -> str:
    """The name of the task: in `cfg` since fairseq 0.10, in `args` before."""
    state = state if isinstance(state, dict) else {}
    settings = state.get("cfg")
    task = settings.get("task") if isinstance(settings, dict) else None
    name = task.get("_name") if isinstance(task, dict) else getattr(task, "_name", None)
    return str(name or getattr(state.get("args"), "task", ""))
