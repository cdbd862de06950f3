"""What the tests share: the demo set, stock fairseq as the oracle, and our task on the same checkpoint."""

import argparse
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from hypothesis import settings
from omegaconf import OmegaConf

import fairseq_el  # noqa: F401  (registers tasks and architectures, allow-lists checkpoint classes)
from fairseq_el.tasks import ELTranslationConfig, ELTranslationTask

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
LONGEST_SOURCE = 190  # pieces, in configs/demo.yaml
sys.path.insert(0, str(ROOT / "scripts"))

# The same cases on every machine, so that a change is judged by what it changed. For new cases:
# pytest --hypothesis-profile explore
settings.register_profile("same_cases", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same_cases")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Whatever ran before, and whether it ran."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def quiet_fairseq():
    logging.getLogger("fairseq").setLevel(logging.ERROR)


def run_command(*words, cwd=ROOT, **options) -> subprocess.CompletedProcess:
    """A command line of fairseq's, or of this project's scripts, as a user types it."""
    command = [str(word) for word in words]
    if command[0].startswith("fairseq-"):
        command[0] = str(Path(sys.executable).with_name(command[0]))
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, **options)


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


class System:
    """A task with models loaded by it: stock fairseq's or ours."""

    def __init__(self, task_class, config_class, data: Path, paths, **options):
        config = config_class(
            data=str(data), source_lang="source", target_lang="target", train_subset="train",
            dataset_impl=None, required_seq_len_multiple=1, **options,
        )  # fmt: skip
        self.task = task_class.setup_task(OmegaConf.structured(config))
        self.models, _ = checkpoint_utils.load_model_ensemble([str(p) for p in paths], task=self.task)
        for model in self.models:
            model.float()

    def batches(self, batch_size: int = 32):
        if "test" not in self.task.datasets:
            self.task.load_dataset("test")
        return self.task.get_batch_iterator(
            self.task.dataset("test"), max_sentences=batch_size, max_positions=(512, 128),
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)  # fmt: skip

    def generate(
        self, batch_size: int = 32, seed: int = 1, longest: int = 512, inference=None, **search
    ) -> list[list[dict]]:
        """Hypotheses of the whole set (less sources over `longest` tokens) in its order.

        `search` is what a command line would say.
        """
        search = {"max_len_b": 30, **search}
        extra = {k: search.pop(k) for k in ("lm_model", "lm_weight") if k in search}
        generator = self.task.build_generator(
            self.models, argparse.Namespace(**search), extra_gen_cls_kwargs=extra
        )
        torch.manual_seed(seed)
        found = {}
        for sample in self.batches(batch_size):
            if sample["net_input"]["src_tokens"].size(1) > longest:
                continue
            ids = sample["id"].tolist()
            if search.get("diverse_beam_groups", 0) > 0:
                # stock fairseq looks up batch rows by sentence id here, and fails; rows it can count itself
                sample["id"] = None
            arguments = inference(sample) if inference else {}
            hypotheses = self.task.inference_step(generator, self.models, sample, **arguments)
            found.update(zip(ids, hypotheses))
        self.generator = generator
        return [found[i] for i in sorted(found)]


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


def assert_same_hypotheses(ours, theirs, tolerance: float = 1e-4) -> None:
    """Token for token, in the same order of merit, scores within the tolerance."""
    assert len(ours) == len(theirs) > 0
    for number, (mine, other) in enumerate(zip(ours, theirs)):
        assert [h["tokens"].tolist() for h in mine] == [h["tokens"].tolist() for h in other], number
        for h, g in zip(mine, other):
            for scores in ("score", "positional_scores"):
                torch.testing.assert_close(h[scores], g[scores], atol=tolerance, rtol=0, equal_nan=True)


@pytest.fixture(scope="session")
def perturbed_model(tmp_path_factory) -> Path:
    """A second model for ensembles: the demo model with a little noise on its weights."""
    state = fairseq_el.checkpoint.load(DEMO / "model.pt")
    noise = torch.Generator().manual_seed(5)
    for name, weight in state["model"].items():
        if weight.is_floating_point() and weight.dim() > 1:
            spread = float(weight.float().std())
            jitter = torch.randn(weight.shape, generator=noise) * 0.05 * spread
            state["model"][name] = (weight.float() + jitter).to(weight.dtype)
    path = tmp_path_factory.mktemp("ensemble") / "perturbed.pt"
    torch.save(state, path)
    return path
