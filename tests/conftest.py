"""What the tests share: the demo set, stock fairseq as the oracle, and our task on the same checkpoint."""

import logging
from pathlib import Path

import pytest
import torch
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from hypothesis import settings

import fairseq_el  # noqa: F401  (registers tasks and architectures, allow-lists checkpoint classes)
from fairseq_el.plugin import threads
from fairseq_el.plugin.tasks import ELTranslationConfig, ELTranslationTask
from helpers import DEMO, LONGEST_SOURCE, System, run_command

# The same cases on every machine, so that a change is judged by what it changed. For new cases:
# pytest --hypothesis-profile explore
settings.register_profile("same_cases", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same_cases")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Whatever ran before, and whether it ran."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Tests that look at warnings must not depend on what else the machine does."""
    monkeypatch.setattr(threads, "free_cores", lambda before: None)


@pytest.fixture(autouse=True, scope="session")
def quiet_fairseq():
    logging.getLogger("fairseq").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory) -> Path:
    """The first 96 pairs of the demo set, in fairseq's binarised form."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("demo")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(DEMO / "sentencepiece.model"))
    for side in ("source", "target"):
        lines = (DEMO / f"test.{side}").read_text(encoding="utf-8").splitlines()[:96]
        encoded = (" ".join(pieces.encode(line, out_type=str)[:LONGEST_SOURCE]) for line in lines)
        (folder / f"test.{side}").write_text("\n".join(encoded) + "\n", encoding="utf-8")
    done = run_command(
        "fairseq-preprocess", "-s", "source", "-t", "target", "--testpref", folder / "test",
        "--srcdict", DEMO / "dict.txt", "--tgtdict", DEMO / "dict.txt", "--destdir", folder / "bin",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture
def stock(demo_data):
    """A fresh stock system each time: stock fairseq leaves the beam size of a search on BART's modules, and
    a greedy search after a beam search on the same model goes wrong there."""

    def build(*paths, **options):
        paths = paths or [DEMO / "model.pt"]
        return System(TranslationTask, TranslationConfig, demo_data, paths, **options)

    return build


@pytest.fixture
def el(demo_data):
    def build(*paths, **options):
        paths = paths or [DEMO / "model.pt"]
        return System(ELTranslationTask, ELTranslationConfig, demo_data, paths, **options)

    return build


@pytest.fixture(scope="session")
def perturbed_model(tmp_path_factory) -> Path:
    """A second model for ensembles: the demo model with a little noise on its weights."""
    state = torch.load(DEMO / "model.pt", weights_only=True)
    noise = torch.Generator().manual_seed(5)
    for name, weight in state["model"].items():
        if weight.is_floating_point() and weight.dim() > 1:
            spread = float(weight.float().std())
            jitter = torch.randn(weight.shape, generator=noise) * 0.05 * spread
            state["model"][name] = (weight.float() + jitter).to(weight.dtype)
    path = tmp_path_factory.mktemp("ensemble") / "perturbed.pt"
    torch.save(state, path)
    return path
