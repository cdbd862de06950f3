"""What `fairseq-el evaluate` runs: a preset with fairseq_el in some precision, or with stock fairseq."""

import argparse
from dataclasses import dataclass, replace

from fairseq_el.cli.chosen_preset import precision_of
from fairseq_el.errors import UserError
from fairseq_el.jobs.presets import Preset
from fairseq_el.resources import USER_DIR

STOCK = ["--user-dir", str(USER_DIR), "--task", "stock_cache_meter"]
OURS = ["--user-dir", str(USER_DIR), "--el-profile"]


@dataclass(frozen=True)
class Variant:
    """A system to evaluate. It has one name in tables and another as a folder."""

    preset: Preset
    stock: bool = False
    fp16: bool = False

    @property
    def attention(self) -> str:
        return "stock" if self.stock else str(self.preset.options.get("el_attention", "auto"))

    @property
    def precision(self) -> str:
        return "auto" if self.stock else precision_of(self.preset)

    @property
    def name(self) -> str:
        parts = ["stock fairseq"] * self.stock + [self.precision] * (self.precision != "auto") + ["fp16"] * self.fp16
        return ", ".join(dict.fromkeys(parts)) or "exact"

    @property
    def folder(self) -> str:
        parts = [self.preset.name, self.preset.search, self.attention]
        return "-".join(parts + [self.precision] * (self.precision != "auto") + ["fp16"] * self.fp16)

    @property
    def is_language_model(self) -> bool:
        return "language_modeling" in self.preset.options.get("task", "translation")

    def compared_with(self, system: str) -> "Variant":
        """system: `exact` or `stock`."""
        other = replace(self, stock=system == "stock", fp16=False, preset=self.preset.changed(el_precision="auto"))
        if other.name == self.name:
            raise UserError(
                f"--compare {system} would compare {self.name} with itself: name a precision, such as --precision int8"
                if system == "exact"
                else "--compare stock would compare stock fairseq with itself: leave out --stock"
            )
        return other

    def arguments(self, args: argparse.Namespace) -> list[str]:
        """For `fairseq-generate`. Scores are left to us: fairseq would compute them on pieces."""
        left_out = [name for name in self.preset.options if name == "scoring" or name.startswith("rouge_")]
        words = ["--fp16"] * self.fp16 + ["--cpu"] * args.cpu + ["--seed", str(args.seed)]
        if self.is_language_model:
            words += ["--sample-break-mode", "eos"]
        if self.stock:
            left_out += [name for name in self.preset.options if name == "task" or name.startswith("el_")]
        arguments = self.preset.changed(**dict.fromkeys(left_out)).arguments()
        return [*words, *(STOCK if self.stock else OURS), *arguments]
