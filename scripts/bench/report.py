"""Results as JSON files and pages: what both share, the page of summary, and README's numbers."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
NOT_MEASURED = "not measured"
README_MARK = "benchmark"
OF_SYSTEM = ("versions", "settings", "command")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with padded columns; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths)
        padded = [first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def times(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}x"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.2f} MB"


def replace_section(page: Path, name: str, text: str) -> None:
    """Puts a text between its markers, or at the end; the rest of the page stays unchanged."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    old = page.read_text() if page.exists() else ""
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    new = pattern.sub(lambda _: section, old) if pattern.search(old) else f"{old.rstrip()}\n\n{section}\n".lstrip()
    page.write_text(new)


def run_facts(results: dict[str, Any]) -> str:
    facts = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Machine: {facts['machine']}, {facts['cores']} cores, "
        f"{gigabytes(facts['memory_bytes'])} of memory, {facts['system']}.\n"
        f"Versions: {versions}. Commit {facts['commit']}, {facts['date']}.\n"
        f"Command: `{facts['command']}`"
    )


# ---- results


def split(lines: Path, folder: Path) -> None:
    """Makes a JSON file for each experiment of the lines of a run. What all records of a system share, it has once."""
    facts, *records = (json.loads(line) for line in lines.read_text().splitlines())
    del facts["kind"]
    by_experiment: dict[str, list[Record]] = {}
    systems: dict[str, dict[str, Any]] = {}
    for record in records:
        name = record["cell"].partition("/")[0]
        own = {fact: record[fact] for fact in OF_SYSTEM if fact in record}
        first = systems.setdefault(name, {}).setdefault(record["system"], own)
        kept = {fact: value for fact, value in record.items() if fact not in own or first.get(fact) != value}
        by_experiment.setdefault(name, []).append(kept)
    folder.mkdir(parents=True, exist_ok=True)
    for name, own_records in by_experiment.items():
        versions = dict(facts["versions"])
        for system in ("stock", "el", "operations"):
            versions |= systems[name].get(system, {}).get("versions", {})
        made = {"experiment": name, "environment": facts | {"versions": versions}, "systems": systems[name]}
        text = json.dumps(made, indent=1)[:-2] + ',\n "records": [\n'
        text += ",\n".join("  " + json.dumps(record) for record in own_records) + "\n ]\n}\n"
        (folder / f"{name}.json").write_text(text)


def continue_published(folder: Path, file: Path, facts: dict[str, Any]) -> None:
    """Begins the lines of a run with what was published of the same code and machine."""
    experiments = [json.loads(name.read_text()) for name in sorted(folder.glob("*.json"))]
    published = [own for own in experiments if own.get("environment", {}).get("commit") == facts["commit"]
                 and own["environment"]["machine"] == facts["machine"] and "systems" in own]  # fmt: skip
    if not published or facts["quick"]:
        return
    lines = [{"kind": "run"} | facts]
    lines += [own["systems"][record["system"]] | record for own in published for record in own["records"]]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Measured:
    """What was measured of one experiment; empty where nothing was."""

    def __init__(self, folder: Path, experiment: str):
        file = folder / f"{experiment}.json"
        self.results = json.loads(file.read_text()) if file.exists() else None
        self.records: list[Record] = self.results["records"] if self.results else []

    def of(self, key: str) -> list[Record]:
        """The rounds of a cell that went well."""
        return [r for r in self.records if r["cell"] == key and not {"failed", "over_budget"} & set(r)]

    def why_missing(self, key: str) -> str:
        failed = [r["failed"] for r in self.records if r["cell"] == key and "failed" in r]
        return NOT_MEASURED if not failed else "does not fit" if failed[0] == "does not fit" else "failed"

    def spread(self, cell: Any, quantity: str = "seconds", scale: float = 1.0) -> "Spread | None":
        """Over the rounds, at least as many as were asked for."""
        found = [r[quantity] * scale for r in self.of(cell.key) if r.get(quantity) is not None]
        return Spread(found) if len(found) >= cell.rounds else None

    def per_text(self, cell: Any) -> "Spread | None":
        """Seconds; the batch may be smaller than the request's, under a budget."""
        own = self.of(cell.key)
        return self.spread(cell, scale=1 / own[0]["batch"]) if own else None


class Spread:
    """Median and range."""

    def __init__(self, values: list[float]):
        self.median, self.least, self.most = median(values), min(values), max(values)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"

    def milliseconds(self) -> str:
        return str(Spread([1e3 * self.median, 1e3 * self.least, 1e3 * self.most]))


# ---- pages


def write_pages(folder: Path, docs: Path, readme: Path | None) -> list[Path]:
    """All pages, also those of which nothing was measured; returns their files."""
    from bench import pages, plots
    from bench.plan import FULL, QUICK

    files = [folder / f"{name}.json" for name in pages.PAGES]
    quick = any(json.loads(file.read_text())["environment"]["quick"] for file in files if file.exists())
    sizes = QUICK if quick else FULL
    (docs / "benchmarks").mkdir(parents=True, exist_ok=True)
    written = [docs / "benchmarks.md"]
    for name, (title, render) in pages.PAGES.items():
        measured = Measured(folder, name)
        opening = [f"# {title}", "Part of the [benchmarks](../benchmarks.md)."]
        if measured.results:
            opening += [run_facts(measured.results), *pages.minutes_sentence(measured)]
        if quick:
            opening.append("**Toy sizes (`--quick`): this shows that the benchmark runs, and nothing else.**")
        written.append(docs / "benchmarks" / f"{name}.md")
        written[-1].write_text("\n\n".join([*opening, *render(measured, sizes, folder)]) + "\n")
    plots.draw_all(folder, sizes, docs / "benchmarks")
    written[0].write_text("\n\n".join(pages.summary(folder, sizes)) + "\n")
    if readme:
        replace_section(readme, README_MARK, pages.readme_section(folder, sizes))
    return written
