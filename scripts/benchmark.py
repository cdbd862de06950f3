#!/usr/bin/env python3
"""Measures fairseq_el beside other systems, and writes what it finds as JSON and Markdown.

scripts/benchmark.py generator          the generator beside stock fairseq and other systems
scripts/benchmark.py gpt2               language models with long prompts, beside the same
scripts/benchmark.py table1             exhibits of the paper beside our own: table1, table4, figure3, figure4
scripts/benchmark.py generator --quick  the same at toy size, in under a minute
scripts/benchmark.py generator --figures auto    only that; the other figures stay as they were measured
scripts/benchmark.py report             docs/benchmarks.md again from the JSON of earlier runs
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import driver, generator, generator_report, language
from bench.checkpoints import Checkpoint
from bench.environment import BUILD, ROOT, describe, ensure_peers
from bench.report import replace_section
from bench.systems import LANGUAGE_SYSTEMS, SYSTEMS, SystemKind

sys.path.append(str(ROOT))  # for fairseq_el where it isn't installed

PAGE = ROOT / "docs" / "benchmarks.md"


def run_generator(args: argparse.Namespace) -> None:
    settings = generator.QUICK if args.quick else generator.Settings()
    kinds = chosen(SYSTEMS, args)
    prepare(settings.checkpoint, kinds)
    cells = generator.plan(settings, kinds, args.figures)
    loaded, records = driver.run(
        kinds, cells, args.repeats, settings.checkpoint, logs=args.output / "logs"
    )
    environment = describe(loaded)
    measured = dict.fromkeys([*args.figures, "loading"], environment)
    earlier = earlier_results(args, settings)
    if earlier:  # what is not measured this time stays as it was
        records += [r for r in earlier["records"] if r["figure"] not in args.figures]
        measured |= {name: run for name, run in earlier["measured"].items() if name not in args.figures}
    made = generator.figures(settings, loaded, records)
    if earlier:
        made["loading"] = earlier["figures"]["loading"]
    results = {
        "measured": measured,
        "figures": made,
        "bars": generator.bars(settings, made),
        "records": records,
    }
    write(args, "generator", asdict(settings), environment, results)


def earlier_results(args: argparse.Namespace, settings: generator.Settings) -> dict | None:
    """Results to add to, where this run measures only some figures."""
    if set(args.figures) == set(generator.FIGURES):
        return None
    earlier = read_results(args, "generator", settings)
    if earlier and "measured" not in earlier:
        earlier["measured"] = dict.fromkeys([*generator.FIGURES, "loading"], earlier["environment"])
    return earlier


def read_results(args: argparse.Namespace, exhibit: str, settings) -> dict | None:
    """What an earlier run with the same settings has written."""
    file = args.output / f"{exhibit}.json"
    if not file.exists():
        return None
    earlier = json.loads(file.read_text())
    same = json.loads(json.dumps(asdict(settings)))
    return earlier if {k: v for k, v in earlier["settings"].items() if k != "repeats"} == same else None


def run_gpt2(args: argparse.Namespace) -> None:
    """One model after the other; each is written when it is done, beside what earlier runs found."""
    settings = language.QUICK if args.quick else language.Settings()
    kinds = chosen(LANGUAGE_SYSTEMS, args)
    for name in args.models or settings.checkpoints:
        checkpoint = settings.checkpoints[name]
        prepare(checkpoint, kinds)
        cells = language.plan(settings, kinds)
        rounds = settings.rounds(name, args.repeats)
        loaded, records = driver.run(kinds, cells, rounds, checkpoint, logs=args.output / "logs")
        environment = describe(loaded)
        earlier = read_results(args, "gpt2", settings)
        all_records = (earlier["records"] if earlier else {}) | {name: records}
        measured = (earlier["measured"] if earlier else {}) | {name: environment}
        rows = language.figures(settings, all_records)
        results = {
            "measured": measured,
            "figures": rows,
            "bars": language.bars(settings, rows),
            "records": all_records,
        }
        write(args, "gpt2", asdict(settings), environment, results)


def chosen(systems: dict[str, SystemKind], args: argparse.Namespace) -> list[SystemKind]:
    """Toy runs leave out what needs an environment of its own."""
    names = args.systems or [n for n, kind in systems.items() if not (args.quick and kind.needs_peers)]
    return [systems[name] for name in names]


def prepare(checkpoint: Checkpoint, kinds: list[SystemKind]) -> None:
    checkpoint.ensure()
    if any(kind.needs_peers for kind in kinds):
        ensure_peers()
        checkpoint.ensure_converted()


# Of the paper, each a module of its name.
EXHIBITS = {
    "table1": "FLOPs and bytes of attention's operations, by formula and counted",
    "table4": "bytes of source state, by formula and measured",
    "figure3": "FLOPs, bytes and time of attention's operations",
    "figure4": "time of attention against the source length and the beam size",
}


def load_exhibit(name: str) -> Any:
    """Imported when it is asked for: it needs torch, which the other exhibits leave to their workers."""
    return importlib.import_module(f"bench.{name}").EXHIBIT


def run_exhibit(args: argparse.Namespace) -> None:
    exhibit = load_exhibit(args.exhibit)
    settings = exhibit.quick if args.quick else exhibit.settings
    loaded, records = exhibit.measure(settings, args.repeats, args.output / "logs")
    results = {"figures": exhibit.figures(settings, records), "records": records}
    write(args, exhibit.name, asdict(settings), describe(loaded), results)


RENDER = {"generator": generator_report.render, "gpt2": language.render}


def write(
    args: argparse.Namespace, exhibit: str, settings: dict, environment: dict, results: dict
) -> None:
    facts = {
        "exhibit": exhibit,
        "quick": args.quick,
        "environment": environment,
        "settings": settings | {"repeats": args.repeats},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    results_file = args.output / f"{exhibit}.json"
    results_file.write_text(json.dumps(facts | results, indent=1))
    show(results_file, args.output / "benchmarks.md" if args.quick else PAGE)


def show(results_file: Path, page: Path) -> None:
    results = json.loads(results_file.read_text())
    name, plots = results["exhibit"], []
    if name in RENDER:
        text = RENDER[name](results)
    else:
        exhibit = load_exhibit(name)
        text = exhibit.render(results)
        plots = save_plot(exhibit.draw(results), page.parent, name) if exhibit.draw else []
    replace_section(page, name, text)
    print(f"{text}\n\nwritten: {', '.join(map(str, [results_file, *plots, page]))}")


def save_plot(figure: Any, folder: Path, name: str) -> list[Path]:
    from bench import plots  # where there is a figure, matplotlib is loaded

    return plots.save_plot(figure, folder, name)


def show_all(args: argparse.Namespace) -> None:
    for exhibit in [*RENDER, *EXHIBITS]:
        if (args.output / f"{exhibit}.json").exists():
            show(args.output / f"{exhibit}.json", PAGE)


def parse_arguments(typed: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="exhibit", required=True)
    for exhibit, systems, run, words in (
        ("generator", SYSTEMS, run_generator, "the generator beside its peers"),
        ("gpt2", LANGUAGE_SYSTEMS, run_gpt2, "language models with long prompts beside their peers"),
    ):
        command = commands.add_parser(exhibit, help=words)
        command.add_argument("--quick", action="store_true", help="toy shapes, to see that it runs")
        command.add_argument(
            "--systems", nargs="+", choices=systems, metavar="NAME", help=", ".join(systems)
        )
        command.add_argument("--repeats", type=int, default=3, help="rounds for each figure")
        command.add_argument("--output", type=Path, default=BUILD, help="folder for JSON and logs")
        command.set_defaults(run=run)
        if exhibit == "gpt2":
            command.add_argument(
                "--models", nargs="+", choices=language.Settings().checkpoints, help="measure only these"
            )
        else:
            command.add_argument(
                "--figures",
                nargs="+",
                choices=generator.FIGURES,
                default=generator.FIGURES,
                help="measure only these",
            )
    for exhibit, words in EXHIBITS.items():
        command = commands.add_parser(exhibit, help=words)
        command.add_argument("--quick", action="store_true", help="toy shapes, to see that it runs")
        command.add_argument("--repeats", type=int, default=3, help="rounds, where times are measured")
        command.add_argument("--output", type=Path, default=BUILD, help="folder for JSON and logs")
        command.set_defaults(run=run_exhibit)
    command = commands.add_parser("report", help="the page again, from results at hand")
    command.add_argument("--output", type=Path, default=BUILD, help="folder with the JSON")
    command.set_defaults(run=show_all)
    return parser.parse_args(typed)


def main(typed: list[str] | None = None) -> None:
    """typed: the words of a command line; None for those of this process."""
    args = parse_arguments(typed)
    try:
        args.run(args)
    except driver.WorkerFailed as error:
        sys.exit(f"benchmark: {error}")


if __name__ == "__main__":
    main()
