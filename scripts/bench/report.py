"""Results as Markdown: tables that also read well as plain text, and the page that shows them."""

import re
from pathlib import Path
from typing import Any

from bench.systems import SYSTEMS

PREFACE = """# Benchmarks

Weights are random, in the shapes of the released checkpoints, and output lengths are forced: speed
and memory depend on neither the words nor their quality. Systems that are compared run interleaved
in one run, with one request at a time on the whole machine; times are medians, with the least and
the most in brackets. This page is made by `scripts/benchmark.py` from the results of a real run.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with padded columns; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths)
        padded = [first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def milliseconds(seconds: dict[str, float]) -> str:
    median, least, most = (seconds[name] * 1000 for name in ("median", "least", "most"))
    return f"{median:.1f} ({least:.1f} to {most:.1f})"


def in_seconds(seconds: dict[str, float]) -> str:
    return f"{seconds['median']:.2f} ({seconds['least']:.2f} to {seconds['most']:.2f})"


def times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}x"


def giga(value: float) -> str:
    return f"{value / 1e9:.4g}"


def gigabytes(value: int) -> str:
    return f"{value / 1e9:.2f} GB"


def megabytes(value: int) -> str:
    return f"{value / 1e6:.2f} MB"


def title(row: dict[str, Any]) -> str:
    return SYSTEMS[row["system"]].title


def replace_section(page: Path, experiment: str, text: str) -> None:
    """Puts an experiment's text between its markers; the rest of the page stays unchanged."""
    begin, end = f"<!-- {experiment}: begin -->", f"<!-- {experiment}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    old = page.read_text() if page.exists() else PREFACE
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section, old)
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new)


def opening(heading: str, results: dict[str, Any]) -> list[str]:
    """Heading, machine and versions of an experiment."""
    parts = [f"## {heading}", run_facts(results)]
    if results["quick"]:
        parts.append(
            "**Toy shapes (`--quick`): this shows that the benchmark runs, and nothing else.**"
        )
    return parts


def run_facts(results: dict[str, Any]) -> str:
    facts = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Machine: {facts['machine']}, {facts['cores']} cores, "
        f"{gigabytes(facts['memory_bytes'])} of memory, {facts['system']}.\n"
        f"Versions: {versions}. Commit {facts['commit']}, {facts['date']}.\n"
        f"Command: `{facts['command']}`" + older_parts(results)
    )


def older_parts(results: dict[str, Any]) -> str:
    """Names the figures that an earlier run measured."""
    runs: dict[str, list[str]] = {}
    for figure, facts in results.get("measured", {}).items():
        if facts["date"] != results["environment"]["date"]:
            runs.setdefault(f"commit {facts['commit']}, {facts['date']}", []).append(figure)
    return "".join(f"\nFrom an earlier run ({run}): {', '.join(names)}." for run, names in runs.items())
