"""Threads that share a Summarizer, a model or nothing find what each would find alone: no state is left behind."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_el.jobs import presets
from fairseq_el.jobs.summarizer import Summarizer
from helpers import ARTICLES, DEMO, TEXTS, make_language_model


def in_threads(*works: Callable[[], list]) -> list[list]:
    """Runs all at once; returns what each has found."""
    start = threading.Barrier(len(works))
    found: list = [None] * len(works)

    def run(place: int, work: Callable[[], list]) -> None:
        start.wait()
        found[place] = work()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_threads_sharing_a_summarizer_find_what_one_finds():
    texts = [text[:150] for text in TEXTS]
    alone, shared = (Summarizer.load("demo", "demo", max_len_b=15) for _ in range(2))
    expected = [alone([text])[0] for text in texts]
    ways = (
        lambda: [shared([text])[0] for text in texts],  # one by one
        lambda: shared(texts[::-1]),  # together, the other way round
    )
    assert in_threads(*ways) == [expected, expected[::-1]]


@pytest.fixture(scope="module")
def other_model(perturbed_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    shutil.copy(perturbed_model, folder / "model.pt")
    for name in ("dict.txt", "sentencepiece.model"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def test_alternating_beam_sizes_and_models_change_nothing(other_model):
    """All beam sizes on one model in memory, in one thread and then in two, against a model loaded for each."""
    kinds = [(DEMO, 4), (DEMO, 1), (other_model, 4), (DEMO, 2)]
    texts = [text[:150] for text in TEXTS[:6]]
    expected = {kind: Summarizer.load(kind[0], "demo", beam=kind[1], max_len_b=15)(texts) for kind in kinds}
    assert len({tuple(found) for found in expected.values()}) == len(kinds)  # else this would show nothing

    loaded = {model: Summarizer.load(model, "demo") for model in (DEMO, other_model)}
    shared = {
        (model, beam): Summarizer(
            loaded[model].task, loaded[model].model, loaded[model].tokenizer,
            presets.load("demo").changed(beam=beam, max_len_b=15),
        )
        for model, beam in kinds
    }  # fmt: skip

    def alternate(order: list) -> list:
        found: dict = {kind: [] for kind in kinds}
        for text in texts:
            for kind in order:
                found[kind] += shared[kind]([text])
        return [found[kind] for kind in kinds]

    wanted = [expected[kind] for kind in kinds]
    assert alternate(kinds) == wanted
    assert in_threads(lambda: alternate(kinds), lambda: alternate(kinds[::-1])) == [wanted, wanted]


def test_samples_of_one_thread_do_not_depend_on_another(tmp_path):
    """torch has one source of random numbers for all threads."""
    model = make_language_model(tmp_path / "model")
    options = {"max_new_tokens": 25, "keep_sentences": None, "longest_source": 30}
    samplers = [Summarizer.load(model, "gpt2_cnndm", "topk", seed=seed, **options) for seed in (1, 2)]
    expected = [sampler(ARTICLES) for sampler in samplers]
    assert expected[0] != expected[1]
    for _ in range(3):
        assert in_threads(*(lambda s=sampler: s(ARTICLES) for sampler in samplers)) == expected
