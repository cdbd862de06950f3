#!/usr/bin/env python3
"""Measures fairseq_el beside other systems: whole generations, in rounds that go over all systems.

scripts/benchmark.py prepare             environments of the other systems and converted weights, once
scripts/benchmark.py list                the groups in their order: what is there, and the minutes of what is missing
scripts/benchmark.py run --minutes 60    the most valuable groups first; the same command again goes on
scripts/benchmark.py run --quick         toy sizes, in minutes, with pages in build/benchmark/quick
scripts/benchmark.py publish             takes the results of this commit into docs/results, and makes the pages
scripts/benchmark.py report              makes the pages, the plots and README's numbers from docs/results

A run writes build/benchmark/results/COMMIT.jsonl, a line for each measurement as soon as it is made, and goes on from
what was published of the same code on the same machine.
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from bench import environment, report
from bench.environment import BUILD, ROOT, SYSTEMS
from bench.runner import Cell, Results, Run, prepare

RESULTS = ROOT / "docs" / "results"
DOCS = ROOT / "docs"


def results_file(args: argparse.Namespace) -> Path:
    if args.output:
        return args.output
    return BUILD / "quick" / "results.jsonl" if args.quick else BUILD / "results" / f"{environment.commit()}.jsonl"


def chosen_groups(args: argparse.Namespace) -> list[list[Cell]]:
    from bench.plan import FULL, QUICK, plan

    wanted = set(args.only or [])

    def is_wanted(cell: Cell) -> bool:
        if wanted and not any(f"{cell.key}/".startswith(f"{name}/") for name in wanted):
            return False
        # a quick run has no time to install a peer
        peer = SYSTEMS[cell.system].environment
        return args.function is run_prepare or not (args.quick and peer and not environment.is_installed(peer))

    groups = plan(QUICK if args.quick else FULL)
    return [kept for group in groups if (kept := [cell for cell in group if is_wanted(cell)])]


def open_results(args: argparse.Namespace) -> Results:
    file, facts = results_file(args), environment.describe() | {"quick": args.quick}
    if not file.exists():
        report.continue_published(RESULTS, file, facts)
    return Results(file, facts)


def run(args: argparse.Namespace) -> None:
    from bench.plan import FULL, QUICK
    from bench.tasks import DemoTexts

    sizes = QUICK if args.quick else FULL
    if args.quick and not args.output:
        shutil.rmtree(BUILD / "quick", ignore_errors=True)
    texts = DemoTexts(sizes.demo_texts)
    texts.write(sizes.demo_texts_file())
    results = open_results(args)
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
    wanted = {(cell.system, cell.checkpoint): cell for group in chosen_groups(args) for cell in group}
    for system, checkpoint in wanted:
        prepare(SYSTEMS[system], checkpoint)


def publish(args: argparse.Namespace) -> None:
    file = results_file(args)
    if not file.exists():
        sys.exit(f"benchmark: there is no {file}: run `scripts/benchmark.py run` first")
    from bench.pages import PAGES

    for name in PAGES:  # nothing of an older commit stays
        (RESULTS / f"{name}.json").unlink(missing_ok=True)
    report.split(file, RESULTS)
    make_pages(args)


def make_pages(args: argparse.Namespace) -> None:
    report.write_pages(RESULTS, DOCS, readme=ROOT / "README.md")


def show_list(args: argparse.Namespace) -> None:
    is_new = not results_file(args).exists()
    results, groups = open_results(args), chosen_groups(args)
    if is_new:
        results.file.unlink()  # it names the command that measured
    results.set_pace(cell for group in groups for cell in group)
    spent, missing = 0.0, 0.0
    for group in groups:
        own = [record for cell in group for record in results.of(cell)]
        took, left = sum(record.get("elapsed", 0.0) for record in own) / 60, results.seconds_left(group) / 60
        spent, missing = spent + took, missing + left
        done = sum(cell.rounds - results.rounds_left(cell) for cell in group)
        name = f"{group[0].experiment}/{group[0].group}"
        print(f"{name:32} {done:3} of {sum(cell.rounds for cell in group):3} measurements,"
              f" {took:5.1f} minutes measured, {left:5.1f} to go by estimate")  # fmt: skip
        if args.cells:
            print(*(f"    {cell.label}: {results.seconds(cell):.1f} s" for cell in group), sep="\n")
    print(f"{spent:.0f} minutes measured, {missing:.0f} to go")


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
        command.set_defaults(function=function, quick=False, only=None, output=None)
        if name == "report":
            continue
        command.add_argument("--output", type=Path, help="file with the measurements")
        if name == "publish":
            continue
        command.add_argument("--quick", action="store_true", help="toy sizes, and the other systems that are there")
        command.add_argument("--only", nargs="+", metavar="CELL", help="only these: peers, or peers/cnndm/8/main/el")
        if name == "list":
            command.add_argument("--cells", action="store_true", help="each cell, with the seconds of one answer")
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
