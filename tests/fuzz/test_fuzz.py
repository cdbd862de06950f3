"""Random tiny models and searches: ours finds what stock fairseq finds, token for token.

The same few hundred cases on every machine. For others, and more of them:

    FUZZ_CASES=1000 pytest tests/fuzz --hypothesis-profile explore
    PYTHONPATH=.:tests python -m fuzz.survey --cases 4000 --first 10000

The second prints a tally instead of stopping at the first difference, and with `--simplify` the simplest case that
goes wrong in the same way.
"""

import os
import warnings
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.cases import FAMILIES, random_case
from fuzz.compare import compare

CASES = int(os.environ.get("FUZZ_CASES", 60))  # of each family
MOST_TIES = 0.05
"""Share of the cases in which rounding may change the order of candidates."""


@pytest.fixture(autouse=True)
def quiet_and_alone():
    """Nothing in these models is worth a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_cases_equal_stock(family):
    tally: Counter = Counter()

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**40))
    def run(seed: int) -> None:
        case = random_case(Random(seed), (family,))
        outcome = compare(case)
        tally[outcome.kind] += 1
        assert outcome.is_fine, f"{outcome.kind}: {case}\n{outcome.detail}"

    run()
    print(dict(tally))
    assert tally["equal"] > 0.6 * CASES  # and not too many that raise in both
    assert tally["tie"] <= MOST_TIES * CASES
