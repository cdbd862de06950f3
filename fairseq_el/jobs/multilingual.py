"""fairseq's tasks for models with many languages, from the settings in a checkpoint and the files next to it.

These put the symbols of languages into sources and targets: M2M-100, WMT21 and mBART-50 are of the task
`translation_multi_simple_epoch`, mBART-25 is of `translation_from_pretrained_bart`.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq.data.multilingual.multilingual_data_manager import MultilingualDatasetManager
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_el.errors import UserError
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.plugin.compatibility import set_missing_args
from fairseq_el.plugin.tasks import el_task
from fairseq_el.text.languages import resolve

TASKS: dict[str, Any] = {
    "translation_multi_simple_epoch": TranslationMultiSimpleEpochTask,
    "translation_from_pretrained_bart": TranslationFromPretrainedBARTTask,
}
# Settings of a checkpoint that say where symbols of languages are, and the values that they may have.
FORMAT: dict[str, tuple[Any, ...]] = {
    "encoder_langtok": (None, "src", "tgt"),
    "decoder_langtok": (False, True),
    "lang_tok_style": ("multilingual", "mbart"),
    "lang_tok_replacing_bos_eos": (False, True),
    "prepend_bos": (False, True),
}
CODE = re.compile(r"[^\W\d]\w{0,30}")
LISTS = ("*langs.txt", "lang_dict.txt")  # a language in each line, such as ML50_langs.txt
PAIRS = "language_pairs*.txt"  # of M2M-100: en-de,en-fr,...


def load_task(name: str, preset: Preset, files: ModelFiles, saved: Any, stock: bool) -> tuple[FairseqTask, Any]:
    """The task, ours or fairseq's own, and its settings.

    name: of the task; saved: its settings in the checkpoint.
    """
    kind = TASKS[name] if stock else el_task(TASKS[name])
    known = languages(files, saved)
    given = preset.task()
    chosen = {
        side: resolve(str(given.get(side) or getattr(saved, side, None) or ""), known, side)
        for side in ("source_lang", "target_lang")
    }
    settings = defaults(kind, files.checkpoint.parent)
    vars(settings).update({option: value for option, value in given.items() if hasattr(settings, option)})
    pair = "-".join(chosen.values())
    vars(settings).update(text_format(files, saved), **chosen, langs=known, lang_pairs=pair, seed=1)
    if name == "translation_from_pretrained_bart":
        settings.langs = ",".join(known)
        task = kind(settings, *map(files.load_dictionary, chosen.values()))
    else:
        task = kind(settings, *MultilingualDatasetManager.prepare(lambda path: load_dictionary(files, path), settings))
    set_missing_args(task)
    return task, settings


def framed(task: Any, row: list[int]) -> list[int]:
    """The source `text </s>` with what the task puts around it."""
    if not isinstance(task, TranslationMultiSimpleEpochTask | TranslationFromPretrainedBARTTask):
        return row
    dataset = task.build_dataset_for_inference([torch.tensor(row)], [len(row)])
    return dataset.collater([dataset[0]])["net_input"]["src_tokens"][0].tolist()


def load_dictionary(files: ModelFiles, path: str) -> Any:
    """path: `dict.LANGUAGE.txt`, as the task calls it."""
    return files.load_dictionary(Path(path).name.removeprefix("dict.").removesuffix(".txt"))


def defaults(task: Any, folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    task.add_args(parser)
    return parser.parse_args([str(folder)])


def text_format(files: ModelFiles, saved: Any) -> dict[str, Any]:
    found = {name: getattr(saved, name) for name in FORMAT if hasattr(saved, name)}
    if any(value not in FORMAT[name] for name, value in found.items()):
        raise damaged(files)
    return found


def languages(files: ModelFiles, saved: Any) -> list[str]:
    """The languages of the model in the order of their symbols: from a list next to the checkpoint, else from its
    settings."""
    folder = files.checkpoint.parent
    lists = [path for pattern in LISTS for path in sorted(folder.glob(pattern))]
    pairs = next(iter(sorted(folder.glob(PAIRS))), None)
    if lists:
        found = read(lists[0]).split()
    elif getattr(saved, "langs", None):
        found = as_list(saved.langs)
    else:
        named = as_list(read(pairs).strip() if pairs else getattr(saved, "lang_pairs", None))
        found = sorted({code for pair in named for code in pair.split("-")})
    if not found or not all(map(CODE.fullmatch, found)):
        raise UserError(
            f"{lists[0] if lists else files.checkpoint} names no languages: put the model's list of languages, one in "
            f"each line, into {folder} as langs.txt"
        )
    return found


def as_list(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split(",")
    return [str(part) for part in value] if isinstance(value, Iterable) else []


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: get it again") from error


def damaged(files: ModelFiles) -> UserError:
    return UserError(f"the settings of languages in {files.checkpoint} are damaged: get the file again")
