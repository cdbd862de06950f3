#!/usr/bin/env python3
"""Measures fairseq_el beside other systems: whole generations, in rounds that go over all systems.

scripts/benchmark.py prepare             environments of the other systems and converted weights, once
scripts/benchmark.py run --minutes 45    the most valuable cells first; the same command again goes on
scripts/benchmark.py run --quick         toy sizes, in minutes, with pages in build/benchmark/quick
scripts/benchmark.py publish             takes the results of this commit into docs/results, and makes the pages
scripts/benchmark.py report              makes the pages, the plots and README's numbers from docs/results
scripts/benchmark.py list                what is measured, in its order, and what there is already

A run writes build/benchmark/results/COMMIT.jsonl, a line for each measurement as soon as it is made.
"""

import argparse
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from bench import environment, report
from bench.environment import BUILD, ROOT
from bench.runner import Cell, Results, Run, prepare

RESULTS = ROOT / "docs" / "results"
DOCS = ROOT / "docs"


def results_file(args: argparse.Namespace) -> Path:
    if args.output:
        return args.output
    return BUILD / "quick" / "results.jsonl" if args.quick else BUILD / "results" / f"{environment.commit()}.jsonl"


def chosen_groups(args: argparse.Namespace) -> list[list[Cell]]:
    from bench.experiments import FULL, QUICK, plan
    from bench.systems import SYSTEMS

    groups = plan(QUICK if args.quick else FULL)
    wanted = set(args.only or [])

    def is_wanted(cell: Cell) -> bool:
        if wanted and not any(f"{cell.key}/".startswith(f"{name}/") for name in wanted):
            return False
        # environments of peers take minutes to make, which a quick run doesn't have
        return not (args.quick and not args.peers and SYSTEMS[cell.system].environment)

    return [kept for group in groups if (kept := [cell for cell in group if is_wanted(cell)])]


def run(args: argparse.Namespace) -> None:
    from bench.experiments import FULL, QUICK
    from bench.quality import DemoTexts

    sizes = QUICK if args.quick else FULL
    if args.quick and not args.output:
        shutil.rmtree(BUILD / "quick", ignore_errors=True)
    texts = DemoTexts(sizes.demo_texts)
    texts.write(sizes.demo_texts_file())
    results = Results(results_file(args), environment.describe() | {"quick": args.quick})
    logs = results.file.parent / "logs"
    try:
        complete = Run(results, args.minutes, texts.scores).over(chosen_groups(args), logs)
    except KeyboardInterrupt:
        complete = False
    print("complete" if complete else "stopped: the same command goes on", f"({results.file})")
    if args.quick:
        pages = results.file.parent
        report.split(results.file, pages / "results")
        print("pages:", *report.write_pages(pages / "results", pages, readme=None), sep="\n  ")


def run_prepare(args: argparse.Namespace) -> None:
    from bench.systems import SYSTEMS

    wanted = {(cell.system, cell.checkpoint): cell for group in chosen_groups(args) for cell in group}
    for system, checkpoint in wanted:
        prepare(SYSTEMS[system], checkpoint)


def publish(args: argparse.Namespace) -> None:
    file = results_file(args)
    if not file.exists():
        sys.exit(f"benchmark: there is no {file}: run `scripts/benchmark.py run` first")
    for name in report.experiments():  # nothing of an older commit stays
        (RESULTS / f"{name}.json").unlink(missing_ok=True)
    report.split(file, RESULTS)
    make_pages(args)


def make_pages(args: argparse.Namespace) -> None:
    report.write_pages(RESULTS, DOCS, readme=ROOT / "README.md")


def show_list(args: argparse.Namespace) -> None:
    file = results_file(args)
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for group in chosen_groups(args):
        for cell in group:
            own = [record for record in records if record.get("cell") == cell.key and "over_budget" not in record]
            print(f"{len(own)}/{cell.rounds}  {cell.key}")


def parse_arguments(typed: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function, words in (
        ("run", run, "measure"),
        ("prepare", run_prepare, "make what a run needs"),
        ("publish", publish, "take results into docs/"),
        ("report", make_pages, "make the pages again"),
        ("list", show_list, "what is measured, and what is there"),
    ):
        command: Any = commands.add_parser(name, help=words)
        command.set_defaults(function=function, quick=False, peers=False, only=None, output=None)
        if name == "report":
            continue
        command.add_argument("--output", type=Path, help="file with the measurements")
        if name == "publish":
            continue
        command.add_argument("--quick", action="store_true", help="toy sizes, without other systems")
        command.add_argument("--peers", action="store_true", help="with --quick: other systems too")
        command.add_argument("--only", nargs="+", metavar="CELL", help="only these: peers, or peers/cnndm/8/main/el")
        if name == "run":
            command.add_argument("--minutes", type=float, help="time to stop after")
    return parser.parse_args(typed)


def main(typed: list[str] | None = None) -> None:
    """typed: the words of a command line; None for those of this process."""
    args = parse_arguments(typed)
    for name in ("fairseq", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    args.function(args)


if __name__ == "__main__":
    main()
