"""Settings of generation by task, from the files in `configs/`.

A preset is a YAML file of options of `fairseq-generate`, by name, and under `searches` what each way of
searching adds to them. A few options more say what becomes of the text around the model (`TextConfig`).
"""

import difflib
import math
from argparse import Namespace
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

import yaml
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import DatasetConfig, GenerationConfig
from fairseq.scoring import SCORER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_el.errors import UserError
from fairseq_el.resources import resource
from fairseq_el.text.rouge import RougeConfig

CONFIGS = resource("configs")
LARGEST_FILE = 100_000  # characters
DEEPEST = 4  # searches, one of them, its options, and one to spare
COUNTS = (
    "beam", "nbest", "batch_size", "max_tokens", "max_new_tokens", "longest_source", "keep_sentences",
    "max_source_positions", "max_target_positions",
)  # fmt: skip
OF_ANY_SIGN = ("lenpen", "unkpen")
CHOICES = {"task": TASK_DATACLASS_REGISTRY, "scoring": SCORER_REGISTRY}


@dataclass
class TextConfig(FairseqDataclass):
    """What becomes of text around the model. Not options of fairseq: whoever has the text does this."""

    source_suffix: str = field(default="", metadata={"help": "put behind each source"})
    longest_source: Optional[int] = field(
        default=None, metadata={"help": "sources are cut to so many tokens, the suffix included"}
    )
    keep_sentences: Optional[int] = field(
        default=None, metadata={"help": "only so many sentences of an output are its summary"}
    )


@dataclass(frozen=True)
class Preset:
    """One search of a preset, with every option under its name in fairseq's configuration."""

    name: str
    search: str
    options: dict[str, Any]

    def changed(self, **options: Any) -> "Preset":
        """The same with other options, by the names they have on the command line; None leaves an option out."""
        merged = _checked(self.options | {k: v for k, v in options.items() if v is not None}, self.name, options)
        return replace(self, options={k: v for k, v in merged.items() if options.get(k, v) is not None})

    def deterministic(self) -> "Preset":
        """The preset with settings under which the scores of a text depend on nothing but the text: batches of one,
        and a form of attention that does not depend on measured speed."""
        fixed: dict[str, Any] = {"batch_size": 1, "max_tokens": None}
        if self.options.get("el_attention", "auto") == "auto":
            fixed["el_attention"] = "never"
        return self.changed(**fixed)

    def arguments(self) -> list[str]:
        """For the command line of `fairseq-generate`."""
        words: list[str] = []
        for name, value in self.options.items():
            if name in _fields(TextConfig):
                continue
            flag = f"--{name.replace('_', '-')}"
            if not isinstance(value, bool):
                words += [flag, str(value)]
            elif value != self._default(name):  # fairseq's flags turn defaults round
                words.append(flag)
        return words

    def generation(self) -> Namespace:
        """For `task.build_generator`."""
        return Namespace(**self._of(GenerationConfig))

    def task(self) -> dict[str, Any]:
        """For the configuration of the task, such as how many tokens a source may have."""
        return self._of(_task_config(self.options))

    def text(self) -> TextConfig:
        return TextConfig(**self._of(TextConfig))

    def scoring(self) -> RougeConfig:
        return RougeConfig(**self._of(RougeConfig))

    def _default(self, name: str) -> Any:
        return next(getattr(c(), name) for c in _configs(self.options) if name in _fields(c))

    def _of(self, config: type[FairseqDataclass]) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in _fields(config)}


def load(preset: str | Path, search: str = "beam") -> Preset:
    """The preset of that name in `configs/`, or in a YAML file elsewhere."""
    path = _find(preset)
    content = _read(path)
    searches = content.pop("searches", None)
    if not isinstance(searches, dict) or not all(isinstance(v, dict) for v in searches.values()):
        raise UserError(f"{path} has no searches: add some, such as searches: {{beam: {{beam: 4}}}}")
    if search not in searches:
        raise UserError(f"the preset {path.stem} has no search {search!r}: it has {_listed(searches)}")
    checked = {name: _checked(content | more, f"{path.stem} ({name})") for name, more in searches.items()}
    return Preset(path.stem, search, checked[search])


def searches(preset: str | Path) -> list[str]:
    """The ways to search that a preset has."""
    return list(_read(_find(preset)).get("searches") or {})


def names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _find(preset: str | Path) -> Path:
    path = Path(preset) if Path(preset).suffix in (".yaml", ".yml") else CONFIGS / f"{preset}.yaml"
    if not path.is_file():
        raise UserError(f"there is no preset {str(preset)!r}: take one of {_listed(names())}, or a YAML file")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            _check_form(path, file.read(LARGEST_FILE + 1))
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a file of settings in YAML: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a file of settings: write a line such as lenpen: 2.0 for each")
    return {str(name): value for name, value in content.items()}


def _check_form(path: Path, text: str) -> None:
    """Raise a `UserError` for a file that would take more memory or time to read than its size suggests."""
    depth = 0
    for event in yaml.parse(text[:LARGEST_FILE], Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
            raise UserError(f"{path} has references (*name), or values in values: write each option on a line")
    if len(text) > LARGEST_FILE:
        raise UserError(f"{path} is larger than any file of settings: give another preset")


def _checked(options: dict[str, Any], where: str, given: Collection[str] = ()) -> dict[str, Any]:
    """The options with values of the types that fairseq declares for them.

    where: the preset to name in errors; given: options that are not the preset's own but the user's.
    """
    for name, choices in CHOICES.items():
        if name in options and options[name] not in choices:
            hint = _hint(options[name], choices)
            raise UserError(f"{_label(name, where, given)} {str(options[name])[:40]!r} does not exist{hint}")
    typed: dict[str, DictConfig] = {}
    for config in _configs(options):
        typed |= dict.fromkeys(_fields(config), OmegaConf.structured(config))
    return {
        name: value if name in CHOICES else _converted(name, value, typed, _label(name, where, given))
        for name, value in options.items()
    }


def _label(name: str, where: str, given: Collection[str]) -> str:
    """An option in an error: as on the command line, or with the preset that has it."""
    return f"--{name[:40].replace('_', '-')}" if name in given else f"preset {where}: {name[:40]}"


def _converted(name: str, value: Any, typed: dict[str, DictConfig], label: str) -> Any:
    if name not in typed:
        raise UserError(f"{label} is not an option{_hint(name[:40], typed)}")
    default = typed[name]._get_node(name)._value()  # type: ignore[union-attr]
    try:
        typed[name][name] = value
        converted = typed[name][name]
    except (OmegaConfBaseException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).splitlines()[:1])[:200]
        raise UserError(f"{label} {str(value)[:40]} is not valid: {reason}") from error
    if isinstance(converted, int | float):
        least = _least(name, default)
        if not math.isfinite(converted):
            raise UserError(f"{label} {converted} is out of range: a finite number")
        if converted < least:
            raise UserError(f"{label} {converted} is out of range: at least {least}")
    return converted


def _least(name: str, default: Any) -> float:
    """fairseq has defaults below zero for what is switched off; otherwise it takes such values and goes wrong."""
    if name in OF_ANY_SIGN or (isinstance(default, int | float) and default < 0):
        return -math.inf
    return 1 if name in COUNTS else 0


def _configs(options: dict[str, Any]) -> list[type[FairseqDataclass]]:
    """Where fairseq, or this module, declares the options a preset may have."""
    return [GenerationConfig, DatasetConfig, _task_config(options), RougeConfig, TextConfig]


def _task_config(options: dict[str, Any]) -> type[FairseqDataclass]:
    return TASK_DATACLASS_REGISTRY[options.get("task", "translation")]


def _fields(config: type[FairseqDataclass]) -> set[str]:
    return set(config.__dataclass_fields__) - {"_name", "data"}


def _hint(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
