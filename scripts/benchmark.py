#!/usr/bin/env python3
"""Measures fairseq_el beside other systems, and writes what it finds as JSON and Markdown.

scripts/benchmark.py generator          the generator beside stock fairseq and other systems
scripts/benchmark.py generator --quick  the same at toy size, in under a minute
scripts/benchmark.py report             docs/benchmarks.md again from the JSON of earlier runs
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench import driver, generator, generator_report
from bench.environment import BUILD, ROOT, describe, ensure_peers
from bench.report import replace_section
from bench.systems import SYSTEMS

sys.path.append(str(ROOT))  # for fairseq_el where it isn't installed

PAGE = ROOT / "docs" / "benchmarks.md"


def run_generator(args: argparse.Namespace) -> None:
    settings = generator.QUICK if args.quick else generator.Settings()
    kinds = [SYSTEMS[name] for name in args.systems or default_systems(args.quick)]
    settings.checkpoint.ensure()
    if any(kind.needs_peers for kind in kinds):
        ensure_peers()
        settings.checkpoint.ensure_converted()
    cells = generator.plan(settings, kinds, args.figures)
    loaded, records = driver.run(
        kinds, cells, args.repeats, settings.checkpoint, logs=args.output / "logs"
    )
    made = generator.figures(settings, loaded, records)
    results = {
        "exhibit": "generator",
        "quick": args.quick,
        "environment": describe(loaded),
        "settings": asdict(settings) | {"repeats": args.repeats},
        "figures": made,
        "bars": generator.bars(settings, made),
        "records": records,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    results_file = args.output / "generator.json"
    results_file.write_text(json.dumps(results, indent=1))
    page = args.output / "benchmarks.md" if args.quick else PAGE
    show(results_file, page)


def default_systems(quick: bool) -> list[str]:
    return [name for name, kind in SYSTEMS.items() if not (quick and kind.needs_peers)]


def show(results_file: Path, page: Path) -> None:
    text = generator_report.render(json.loads(results_file.read_text()))
    replace_section(page, "generator", text)
    print(f"{text}\n\nwritten: {results_file} and {page}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="exhibit", required=True)
    command = commands.add_parser("generator", help="the generator beside its peers")
    command.add_argument("--quick", action="store_true", help="toy shapes, to see that it runs")
    command.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help=", ".join(SYSTEMS)
    )
    command.add_argument(
        "--figures",
        nargs="+",
        choices=generator.FIGURES,
        default=generator.FIGURES,
        help="measure only these",
    )
    command.add_argument("--repeats", type=int, default=3, help="rounds for each figure")
    command.add_argument("--output", type=Path, default=BUILD, help="folder for JSON and logs")
    command.set_defaults(run=run_generator)
    command = commands.add_parser("report", help="the page again, from results at hand")
    command.add_argument("--output", type=Path, default=BUILD, help="folder with the JSON")
    command.set_defaults(run=lambda args: show(args.output / "generator.json", PAGE))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    try:
        args.run(args)
    except driver.WorkerFailed as error:
        sys.exit(f"benchmark: {error}")


if __name__ == "__main__":
    main()
