"""What all experiments have in common, and how to measure those that need no workers.

An experiment is a module with `EXPERIMENT`, whose parts follow each other: `measure` carries out a plan,
`figures` makes rows of the records, `render` words and tables of the rows, `draw` a plot of them.
All but `measure` are pure, so that page and plot can be made again from a JSON file.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from bench.counting import count
from bench.driver import progress_bar
from bench.generator import Record
from bench.protocol import THREADS
from fairseq_el.models.costs import Cost

Loaded = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. `measure` gets the settings, the number of rounds and a folder
    for logs (and, with --rest, the records of an earlier run), and returns the systems that ran (with
    versions) and the records; the other functions take the results from the JSON file."""

    name: str
    settings: Any
    quick: Any
    measure: Callable[..., tuple[Loaded, list[Record]]]
    figures: Callable[[Any, list[Record]], Any]
    render: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any]], Any] | None = None  # returns a figure of matplotlib
    time_plan: Callable[[Any, int], list[tuple[str, float]]] | None = None  # (what, expected seconds)


@dataclass(frozen=True)
class Comparison:
    """Pieces of work that are compared with each other, by name. `facts` go into their records.

    They are set up when their turn comes and freed before the next comparison.
    """

    facts: dict[str, Any]
    costs: dict[str, Cost]
    set_up: Callable[[], dict[str, Callable[[], object]]]


def time_interleaved(comparisons: list[Comparison], repeats: int, least_seconds: float) -> list[Record]:
    """Times each piece of work once a round, after a round to warm up.

    least_seconds: repeat short work for this long in one measurement, so that the clock's resolution does not count.
    """
    torch.set_num_threads(THREADS)
    rounds = 1 + repeats
    expected = [expected_seconds(cost, least_seconds) for c in comparisons for cost in c.costs.values()]
    records = []
    with torch.no_grad(), progress_bar(rounds * sum(expected)) as bar:
        for comparison in comparisons:
            works = comparison.set_up()
            for repeat in range(rounds):
                for name, work in works.items():
                    bar.set_description_str(describe(comparison.facts, name))
                    seconds = seconds_per_call(work, least_seconds)
                    bar.update(expected_seconds(comparison.costs[name], least_seconds))
                    if repeat > 0:
                        facts = {"kind": "time", "work": name, "repeat": repeat - 1}
                        records.append(comparison.facts | facts | {"seconds": seconds})
            del works, work
        bar.set_description_str("done")
    return records


def count_each(kind: str, works: dict[str, Callable[[], object]], costs: dict[str, Cost]) -> list[Record]:
    """Counts what each piece of work does, in one run of it."""
    torch.set_num_threads(THREADS)
    expected = {name: expected_seconds(costs[name], least_seconds=0.0) for name in works}
    records = []
    with torch.no_grad(), progress_bar(sum(expected.values())) as bar:
        for name, work in works.items():
            bar.set_description_str(f"counting {name}")
            records.append({"kind": kind, "work": name, **count(work)})
            bar.update(expected[name])
        bar.set_description_str("done")
    return records


def seconds_per_call(work: Callable[[], object], least_seconds: float) -> float:
    calls, started = 0, time.perf_counter()
    while True:
        work()
        calls += 1
        passed = time.perf_counter() - started
        if passed >= least_seconds:
            return passed / calls


def expected_seconds(cost: Cost, least_seconds: float) -> float:
    """Rough estimate for the progress bar: two cores with AVX2."""
    return max(least_seconds, cost.flops / 130e9 + cost.bytes / 20e9)


def describe(facts: dict[str, Any], name: str) -> str:
    return ", ".join([*(f"{key} {value}" for key, value in facts.items()), name])


def loaded_here() -> Loaded:
    """Versions of this process, in the format in which workers report theirs."""
    versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}
    return {"here": {"versions": versions}}
