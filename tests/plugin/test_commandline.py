"""fairseq's own commands, with one option more than people typed before."""

import re
import sys

import pytest
import torch

from helpers import DEMO, run_command

SEARCH = ["--beam", 4, "--max-len-b", 30, "--batch-size", 32, "--remove-bpe", "sentencepiece"]


def hypotheses(output: str) -> dict[int, str]:
    return {int(n): text for n, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, flags=re.MULTILINE)}


@pytest.fixture(scope="module")
def stock_output(demo_data):
    """Stock fairseq in its own process; the script only lets torch load the checkpoint's Namespace."""
    done = run_command(
        sys.executable, "-c",
        "import argparse, torch; torch.serialization.add_safe_globals([argparse.Namespace]);"
        "from fairseq_cli.generate import cli_main; cli_main()",
        demo_data, "--path", DEMO / "model.pt", *SEARCH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return hypotheses(done.stdout)


@pytest.mark.parametrize("extra", [[], ["--task", "el_translation", "--el-attention", "always"]])
def test_generate_prints_what_stock_prints(demo_data, stock_output, extra):
    done = run_command(
        "fairseq-generate", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el", *SEARCH, *extra
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert hypotheses(done.stdout) == stock_output
    assert len(stock_output) == 96
    assert "Warning" not in done.stderr
    assert "DEBUG" not in done.stderr


def test_fp16_on_a_cpu_means_half_precision_weights(demo_data, stock_output):
    """The demo's weights are exact in half precision, so nothing changes."""
    done = run_command(
        "fairseq-generate", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el", "--cpu",
        "--fp16", *SEARCH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert hypotheses(done.stdout) == stock_output
    assert re.search(r"packed \d+ linear layers in half precision \(as asked\) and 0 in single", done.stderr)


def test_interactive_prints_what_stock_generate_prints(demo_data, stock_output):
    texts = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:96]
    short = [n for n, text in enumerate(texts) if len(text.split()) < 60][:3]  # not cut in the binarised set
    done = run_command(
        "fairseq-interactive", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el",
        "--beam", 4, "--max-len-b", 30, "--bpe", "sentencepiece",
        "--sentencepiece-model", DEMO / "sentencepiece.model", "-s", "source", "-t", "target",
        input="".join(texts[n] + "\n" for n in short),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert hypotheses(done.stdout) == {i: stock_output[n] for i, n in enumerate(short)}


def test_the_profile_accounts_for_all_time(demo_data):
    done = run_command(
        "fairseq-generate", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el",
        "--el-profile", "--quiet", *SEARCH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = [line for line in done.stderr.splitlines() if line.startswith("fairseq_el | ")]
    stages = re.findall(r"\| (\S.*?\S) +([\d.]+) s +([\d.]+)%", "\n".join(report))
    assert [name for name, _, _ in stages] == [
        "encoder", "K/V build", "self-attention", "cross-attention", "dense", "vocabulary", "search",
    ]  # fmt: skip
    assert sum(float(share) for _, _, share in stages) == pytest.approx(100, abs=0.5)
    assert re.search(r"96 sentences, [\d,]+ tokens in", report[0])
    assert re.search(r"peak source state: [1-9]\d* bytes", "\n".join(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--path", "nowhere/model.pt"], r"nowhere/model\.pt"),
        (["--el-memory-budget", "lots"], r"--el-memory-budget 'lots' is not a size; write for example"),
    ],
)
def test_errors_are_one_line(demo_data, change, message):
    words = ["--path", DEMO / "model.pt"] if change[0] != "--path" else []
    done = run_command(
        "fairseq-generate", demo_data, *words, *change, "--user-dir", "fairseq_el", *SEARCH
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fairseq_el: error: ")
    assert re.search(message, last)
    assert "Traceback" not in done.stderr


def test_a_dictionary_that_does_not_fit_is_named(demo_data, tmp_path):
    for file in demo_data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for side in ("source", "target"):
        lines = (DEMO / "dict.txt").read_text(encoding="utf-8").splitlines()[:-100]
        (tmp_path / f"dict.{side}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = run_command(
        "fairseq-generate", tmp_path, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el", *SEARCH
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    rows = fairseq_rows()
    assert last.startswith("fairseq_el: error: ")
    assert f"{rows:,}" in last and f"{rows - 100:,}" in last
    assert "Traceback" not in done.stderr


def fairseq_rows() -> int:
    state = torch.load(DEMO / "model.pt", map_location="cpu")
    return state["model"]["encoder.embed_tokens.weight"].size(0)
