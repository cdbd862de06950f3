"""A page about an evaluation: one HTML file, with all that it needs in it.

Figures and plots are HTML and SVG. The texts are JSON in a script element, from which the page's script shows as many
as are looked at. All is escaped: by autoescape and the filter `tojson` of Jinja, and by making text nodes of texts.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from fairseq_el.cli.evaluate.comparing import identical_sentence
from fairseq_el.cli.evaluate.histogram import Histogram
from fairseq_el.cli.evaluate.statistics import Comparison, System
from fairseq_el.cli.fairseq_command import human_size

TEMPLATE = Path(__file__).with_name("report.html")
CHARACTERS_OF_SOURCES = 16_000_000  # more make a page that is slow to load: each source is cut to its share
HISTORY = ("preset", "search", "attention", "precision", "fp16", "model", "model_digest", "data", "commit", "date")


def render(
    sources: list[str], references: list[str], systems: list[System], comparison: Comparison | None = None
) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters["size"] = human_size
    shown, longest = shorten(sources)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        systems=systems,
        comparison=comparison,
        identical=identical_sentence(comparison) if comparison else None,
        count=len(references),
        longest_source=longest,
        histograms=histograms_of(sources, references, systems, comparison),
        settings=settings_of(systems),
        data=data_of(shown, references, systems, comparison),
    )


def shorten(sources: list[str]) -> tuple[list[str], int | None]:
    """The sources, and to how many characters they are cut, None if they are not."""
    if sum(map(len, sources)) <= CHARACTERS_OF_SOURCES:
        return sources, None
    longest = CHARACTERS_OF_SOURCES // len(sources)
    return [source if len(source) <= longest else f"{source[:longest]} …" for source in sources], longest


def data_of(
    sources: list[str], references: list[str], systems: list[System], comparison: Comparison | None
) -> dict[str, Any]:
    """For the page's script, by column. Summaries are lists of parts as in `Pair.parts`."""
    if comparison:
        summaries: Any = zip(*(pair.parts for pair in comparison.pairs))
    else:
        summaries = ([[summary] for summary in system.summaries] for system in systems)
    columns = [
        {
            "name": system.name,
            "summaries": parts,
            "scores": {kind: [round(float(x), 1) for x in column] for kind, column in system.scores.items()},
        }
        for system, parts in zip(systems, summaries, strict=True)
    ]
    similarities = [round(pair.similarity, 3) for pair in comparison.pairs] if comparison else None
    return {"sources": sources, "references": references, "systems": columns, "similarities": similarities}


def histograms_of(
    sources: list[str], references: list[str], systems: list[System], comparison: Comparison | None
) -> list[Histogram]:
    lengths = {name: list(map(word_count, texts)) for name, texts in [("sources", sources), ("references", references)]}
    outputs = {system.name: list(map(word_count, system.summaries)) for system in systems}
    found = [
        Histogram.of("Length of sources", " words", {"sources": lengths["sources"]}),
        Histogram.of("Length of summaries", " words", outputs | {"references": lengths["references"]}),
    ]
    for kind in systems[0].scores:
        found.append(Histogram.of(kind, "%", {s.name: s.scores[kind].tolist() for s in systems}))
    differing = [i for i, pair in enumerate(comparison.pairs) if pair.similarity < 1] if comparison else []
    if comparison and differing:
        shares = [100 * comparison.pairs[i].similarity for i in differing]
        title = f"Words in common, of the {len(differing):,} summaries that differ"
        found.append(Histogram.of(title, "%", {f"{systems[0].name} and {systems[1].name}": shares}))
    return found


def word_count(text: str) -> int:
    return len(text.split())


def settings_of(systems: list[System]) -> dict[str, list[str]]:
    """What each system ran with: values by name, one for each system."""
    flat = [
        {name: system.row.get(name) for name in HISTORY}
        | system.row.get("settings", {})
        | {f"version of {name}": version for name, version in system.row.get("versions", {}).items()}
        | system.row.get("machine", {})
        for system in systems
    ]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return {name: [as_text(settings.get(name)) for settings in flat] for name in names}


def as_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
