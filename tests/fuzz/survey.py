"""Runs many random cases and prints how they came out; each that is not as it should be, in its simplest form.

    PYTHONPATH=.:tests python -m fuzz.survey --cases 2000 --first 1
"""

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch

import fairseq_el  # noqa: F401  (registers architectures)
from fuzz.cases import Case, SearchCase, random_case
from fuzz.compare import compare


def survey(seeds: range, simplifies: bool) -> Counter:
    tally: Counter = Counter()
    errors: Counter = Counter()
    for seed in seeds:
        case = random_case(Random(seed))
        outcome = compare(case)
        tally[outcome.kind] += 1
        if outcome.kind == "both raise":
            errors[outcome.detail.splitlines()[-1]] += 1
        elif not outcome.is_fine:
            case = simplify(case) if simplifies else case
            print(f"---- {seed}: {outcome.kind}\n{case}\n{compare(case).detail}", flush=True)
    for error, count in errors.most_common():
        print(f"both raise {count} times: {error}")
    return tally


def simplify(case: Case) -> Case:
    """A case that goes wrong in the same way, with as little in it as possible."""
    kind, changed = compare(case).kind, True
    while changed:
        changed = False
        for simpler in simpler_cases(case):
            if compare(simpler).kind == kind:
                case, changed = simpler, True
                break
    return case


def simpler_cases(case: Case) -> Iterator[Case]:
    if len(case.models) > 1:
        yield from (replace(case, models=(model,)) for model in case.models)
    for row in range(len(case.sources) if len(case.sources) > 1 else 0):
        yield replace(case, **{
            name: None if rows is None else rows[:row] + rows[row + 1 :]
            for name in ("sources", "prefixes", "constraints")
            for rows in [getattr(case, name)]
        })  # fmt: skip
    defaults = {"left_pad": False, "prefixes": None, "bos_token": None, "budget": None, "prepared": False}
    for name, default in defaults.items():
        if getattr(case, name) != default:
            yield replace(case, **{name: default})
    search = case.search
    if search.fusion is not None:
        yield replace(case, search=replace(search, fusion=None))
    for name in search.extra:
        yield replace(case, search=replace(search, extra=without(search.extra, name)))
    for name in search.options:
        if name != "beam":
            yield replace(case, search=replace(search, options=without(search.options, name)))
    if len(search.options) == 1 and search.kind not in ("beam", "allowed"):
        yield replace(case, constraints=None, search=SearchCase(options=search.options))
    for name in case.models[0].settings:
        if not name.endswith(("embed_dim", "layers", "heads", "input_dim", "output_dim", "positions")):
            models = [replace(model, settings=without(model.settings, name)) for model in case.models]
            yield replace(case, models=tuple(models))


def without(values: dict, name: str) -> dict:
    return {key: value for key, value in values.items() if key != name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--simplify", action="store_true", help="look for the simplest case that goes wrong like each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(dict(survey(range(args.first, args.first + args.cases), args.simplify)))


if __name__ == "__main__":
    main()
