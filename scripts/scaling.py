#!/usr/bin/env python3
"""Measures what large jobs depend on, and writes docs/scaling.md's tables from it.

scripts/scaling.py            in about half an hour on 2 idle cores
scripts/scaling.py --quick    at toy size, into build/benchmark/quick
scripts/scaling.py --report   the page again, from docs/results/scaling.json
"""

import argparse
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

from bench.environment import BUILD, ROOT, describe
from bench.report import replace_section

PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "docs" / "results"


def show(results_file: Path, page: Path) -> None:
    import scaling_report

    text = scaling_report.render(json.loads(results_file.read_text()))
    replace_section(page, "scaling", text)
    print(f"{text}\n\nwritten: {results_file}, {page}")


def main(typed: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy shapes, to see that it runs")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--precision", default="auto", help="of fairseq_el (default: auto, which is exact)")
    parser.add_argument("--output", type=Path, help="folder for JSON and, with --quick, the page")
    args = parser.parse_args(typed)
    output = args.output or (BUILD / "quick" if args.quick else RESULTS)
    results_file = output / "scaling.json"
    page = output / PAGE.name if args.quick else PAGE
    if not args.report:
        import scaling_measure  # loads torch, fairseq and Ray
        import scaling_report

        for name in ("fairseq", "fairseq_el"):  # which tell what they load, and how
            logging.getLogger(name).setLevel(logging.WARNING)
        settings = replace(
            scaling_measure.QUICK if args.quick else scaling_measure.Settings(), precision=args.precision
        )
        records = scaling_measure.measure(settings, args.repeats, output / "logs" if args.quick else BUILD / "logs")
        made = {
            "experiment": "scaling", "quick": args.quick, "environment": describe(scaling_measure.versions()),
            "settings": asdict(settings) | {"repeats": args.repeats},
            "figures": scaling_report.figures(settings, records), "records": records,
        }  # fmt: skip
        output.mkdir(parents=True, exist_ok=True)
        results_file.write_text(json.dumps(made, indent=1) + "\n")
    show(results_file, page)


if __name__ == "__main__":
    main()
