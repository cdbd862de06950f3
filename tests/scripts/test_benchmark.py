"""The benchmark, at toy size: what it shows is what it measured."""

import json
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest

from bench import driver, environment, generator, language
from bench.checkpoints import Checkpoint
from bench.protocol import DISTINCT_SENTENCES, EOS, Request, source_sentences
from bench.report import PREFACE, replace_section, table
from bench.systems import SYSTEMS
from bench.worker_stock import StockSystem
from helpers import ROOT, number, parse_tables, run_command

REPEATS = 2
RAN = ("stock", "stock-copied", "el")
QUICK = generator.QUICK
LAYERS = QUICK.checkpoint.overrides["decoder_layers"]
WIDTH = QUICK.checkpoint.overrides["encoder_embed_dim"]


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory) -> Path:
    """The folder of a quick run without peers, whose environment would have to be installed."""
    output = tmp_path_factory.mktemp("benchmark")
    done = run_command(
        sys.executable, ROOT / "scripts" / "benchmark.py", "generator", "--quick",
        "--systems", *RAN, "--repeats", REPEATS, "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="session")
def results(quick_run) -> dict:
    return json.loads((quick_run / "generator.json").read_text())


@pytest.fixture(scope="session")
def tables(quick_run) -> dict[str, list[dict[str, str]]]:
    return parse_tables((quick_run / "benchmarks.md").read_text())


def title(system: str) -> str:
    return SYSTEMS[system].title


def test_every_figure_has_a_table_and_every_table_its_rows(tables):
    assert {name: len(rows) for name, rows in tables.items()} == {
        "Targets": 17,
        "One decoding step": 2 * len(QUICK.step_lengths),
        "Whole generation": len(RAN),
        "The choice of form": len(QUICK.auto_source_lengths) * len(QUICK.auto_beams),
        "Cached source state": len(RAN),
        "Loading": len(RAN),
    }


def test_a_number_shown_is_the_number_in_the_json(tables, results):
    made = results["figures"]
    for shown, row in zip(tables["Whole generation"], made["whole"], strict=True):
        assert shown["system"] == title(row["system"])
        assert number(shown["seconds"]) == pytest.approx(row["seconds"]["median"], abs=0.005001)
        assert number(shown["fairseq_el is faster"]) == pytest.approx(
            row["speedup_of_el"], abs=0.005001
        )
        assert number(shown["peak memory"]) == pytest.approx(row["peak_bytes"] / 1e9, abs=0.005001)
    for shown, row in zip(tables["One decoding step"], made["steps"], strict=True):
        assert (shown["system"], shown["batch"]) == (title(row["system"]), str(row["batch"]))
        assert number(shown["ms a step"]) == pytest.approx(
            1000 * row["seconds"]["median"], abs=0.05001
        )
    for shown, row in zip(tables["The choice of form"], made["auto"], strict=True):
        assert shown["source and beam"] == f"n = {row['source_length']}, beam {row['beam']}"
        assert number(shown["auto"]) == pytest.approx(row["auto"]["median"], abs=0.005001)
        assert number(shown["auto to better"]) == pytest.approx(row["auto_to_better"], abs=0.005001)
    for shown, row in zip(tables["Targets"], results["targets"], strict=True):
        assert shown["figure"] == row["figure"]
        if row["value"] is None:
            assert (shown["measured"], shown["result"]) == ("not measured", "open")
        else:
            assert number(shown["measured"]) == pytest.approx(row["value"], abs=0.005001)
            assert ("not" in shown["result"]) == (not row["met"])


def times_of(results: dict, **wanted) -> list[float]:
    """Seconds in the order of the rounds, straight from the records."""
    found = [
        r for r in results["records"] if all(r[name] == value for name, value in wanted.items())
    ]
    assert [r["repeat"] for r in found] == list(range(REPEATS))
    return [r["seconds"] for r in found]


def test_ratios_are_those_of_the_medians(results):
    whole = {s: statistics.median(times_of(results, figure="whole", system=s)) for s in RAN}
    for row in results["figures"]["whole"]:
        assert row["speedup_of_el"] == pytest.approx(whole[row["system"]] / whole["el"])
    for row in results["figures"]["auto"]:
        shape = {"figure": "auto", "source_length": row["source_length"], "beam": row["beam"]}
        always, never, auto = (
            statistics.median(times_of(results, attention=form, **shape))
            for form in ("always", "never", "auto")
        )
        assert row["auto_to_better"] == pytest.approx(auto / min(always, never))


def test_a_step_is_the_median_of_the_steps_that_were_timed(results):
    found = {(row["system"], row["batch"]): row for row in results["figures"]["steps"]}
    for batch, (_, long) in QUICK.step_lengths.items():
        steps = {}
        for system in ("stock", "el"):
            wanted = {"figure": "steps", "system": system, "batch": batch, "length": long}
            timed = [r for r in results["records"] if wanted.items() <= r.items()]
            assert all(0 < r["step_seconds"] < r["seconds"] for r in timed)
            steps[system] = statistics.median(r["step_seconds"] for r in timed)
            assert found[system, batch]["seconds"]["median"] == pytest.approx(steps[system])
        assert found["el", batch]["speedup_over_stock"] == pytest.approx(
            steps["stock"] / steps["el"]
        )


def test_a_step_of_a_peer_is_the_longer_output_less_the_shorter_by_their_difference():
    batch, (short, long) = next(iter(QUICK.step_lengths.items()))
    times = {short: [1.0, 2.0], long: [2.0, 5.0]}
    records = [
        {"figure": "steps", "system": "transformers", "batch": batch, "length": length}
        | {"seconds": seconds, "step_seconds": None}
        for length, repeats in times.items()
        for seconds in repeats
    ]
    (row,) = generator.step_rows(QUICK, records)
    assert row["seconds"]["median"] == pytest.approx(2.0 / (long - short))


def test_every_system_produces_exactly_the_forced_number_of_tokens(results):
    generated = [r for r in results["records"] if r["op"] != "source_state"]
    assert {r["system"] for r in generated} == set(RAN)
    for record in generated:
        assert len(record["tokens"]) == record["batch"]
        assert {len(sentence) + 1 for sentence in record["tokens"]} == {record["length"]}  # + </s>


def test_source_state_measured_from_live_tensors_is_what_the_formulas_say(results):
    encoder_output = QUICK.whole_batch * QUICK.source_length * WIDTH * 4
    measured = {row["system"]: row["bytes"] for row in results["figures"]["source_state"]}
    assert measured == {
        "stock": 2 * LAYERS * encoder_output,
        "stock-copied": 2 * LAYERS * QUICK.beam * encoder_output,
        "el": encoder_output,
    }


def test_results_name_the_machine_the_versions_and_the_command(results):
    environment = results["environment"]
    assert environment["machine"] and environment["cores"] > 0 and environment["date"]
    assert {"python", "torch", "fairseq"} <= set(environment["versions"])
    assert "generator --quick" in environment["command"]


def test_a_commit_is_marked_where_code_differs_from_it_but_not_for_pages_that_runs_write(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() == "unknown"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "docs").mkdir()
    for file in ("code.py", "docs/page.md"):
        (tmp_path / file).write_text("old")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        assert run_command(*git, *words, cwd=tmp_path).returncode == 0
    name = environment.commit()
    (tmp_path / "docs" / "page.md").write_text("new")
    assert re.fullmatch("[0-9a-f]{10}", name) and environment.commit() == name
    (tmp_path / "code.py").write_text("new")
    assert environment.commit() == f"{name}-dirty"


def test_memory_is_that_of_the_worker_and_its_peak_is_no_less(results):
    for record in results["records"]:
        assert 1e8 < record["memory"]["resident"] <= record["memory"]["peak"] < 4e9


def test_targets_are_met_from_their_limit_on_and_open_without_a_measurement():
    assert generator.target("f", 2.0, at_least=2.0)["met"] is True
    assert generator.target("f", 1.99, at_least=2.0)["met"] is False
    assert generator.target("f", 1.10, at_most=1.10)["met"] is True
    assert generator.target("f", 1.11, at_most=1.10)["met"] is False
    assert generator.target("f", None, at_least=2.0)["met"] is None


def test_all_systems_get_the_same_sources_of_the_requested_length():
    request = Request(
        "generate", batch=2 * DISTINCT_SENTENCES + 1, source_length=40, beam=4, length=5
    )
    sources = source_sentences(request, vocabulary=100)
    assert sources == source_sentences(request, vocabulary=100)
    assert {len(sentence) for sentence in sources} == {40}
    assert all(sentence[-1] == EOS and EOS not in sentence[:-1] for sentence in sources)
    assert max(max(sentence) for sentence in sources) < 100
    assert len({tuple(sentence) for sentence in sources}) == DISTINCT_SENTENCES
    assert sources[0] == sources[DISTINCT_SENTENCES]


@pytest.mark.parametrize("copied", [False, True])
def test_decoding_from_a_remembered_encoder_output_gives_the_same_hypotheses(quick_run, copied):
    checkpoint = QUICK.checkpoint
    system = StockSystem(
        {"checkpoint": str(checkpoint.model), "data": str(checkpoint.data), "copied": copied}
    )
    for batch, beam in ((DISTINCT_SENTENCES + 3, 4), (2, 4), (2, 1)):
        whole, decoded = (
            Request(op, batch, source_length=24, beam=beam, length=7)
            for op in ("generate", "decode")
        )
        sources = source_sentences(whole, system.vocabulary)
        assert system.answer(whole, sources).tokens == system.answer(decoded, sources).tokens


def test_a_worker_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    nowhere = Checkpoint("bart_large", {"missing": 1})
    with pytest.raises(driver.WorkerFailed, match="(?s)stock fairseq ended.*Error"):
        driver.run([SYSTEMS["stock"]], [], 1, nowhere, logs=tmp_path)


def test_an_experiment_replaces_its_own_section_of_the_page_and_no_other(tmp_path):
    page = tmp_path / "docs" / "benchmarks.md"
    replace_section(page, "one", "first text")
    replace_section(page, "two", r"a \d backslash")
    replace_section(page, "one", "second text")
    text = page.read_text()
    assert text.startswith(PREFACE.rstrip())
    assert "first text" not in text
    assert text.index("second text") < text.index(r"a \d backslash")


def test_a_table_reads_as_plain_text():
    assert table(["name", "n"], [["a", "1"], ["bcdef", "1234"]]).splitlines() == [
        "| name  |    n |",
        "| ----- | ---: |",
        "| a     |    1 |",
        "| bcdef | 1234 |",
    ]


def test_figures_that_are_not_measured_again_stay_and_say_so(quick_run, results, tmp_path):
    output = shutil.copytree(quick_run, tmp_path / "again")
    done = run_command(
        sys.executable, ROOT / "scripts" / "benchmark.py", "generator", "--quick", "--figures", "source_state",
        "--systems", "el", "--repeats", 1, "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = json.loads((output / "generator.json").read_text())
    for figure in ("steps", "whole", "auto", "loading"):
        assert again["figures"][figure] == results["figures"][figure]
    assert [row["system"] for row in again["figures"]["source_state"]] == ["el"]
    assert again["measured"]["steps"] == results["environment"]
    note = re.search(r"^From an earlier run .*$", (output / "benchmarks.md").read_text(), re.MULTILINE)
    if again["environment"]["date"] != results["environment"]["date"]:  # to the minute
        assert "steps" in note[0] and "source_state" not in note[0]


@pytest.fixture(scope="session")
def language_run(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("gpt2")
    done = run_command(
        sys.executable, ROOT / "scripts" / "benchmark.py", "gpt2", "--quick",
        "--systems", "stock", "el", "el-unscored", "--repeats", REPEATS, "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def test_the_experiment_of_language_models_compares_equal_outputs(language_run):
    results = json.loads((language_run / "gpt2-toy.json").read_text())
    settings = language.QUICK
    rows = {(row["beam"], row["system"]): row for row in results["figures"]}
    for beam in settings.beams:
        assert rows[beam, "el"]["equal_to_stock"] == settings.batch
        prompt = settings.batch * (settings.prompt_length - 1)  # the newest token is the first step's
        layers, width = language.TINY["decoder_layers"], language.TINY["decoder_embed_dim"]
        assert rows[beam, "state, always"]["state_bytes"] == prompt * (layers * width * 4 + 1)
        stock = 2 * layers * width * 4 * settings.batch * settings.prompt_length * beam
        assert rows[beam, "stock"]["state_bytes"] == stock
    whole = [record for record in results["records"] if record["figure"] == "whole"]
    assert {len(tokens) for record in whole for tokens in record["tokens"]} == {settings.length - 1}
    shown = parse_tables((language_run / "benchmarks.md").read_text())
    assert len(shown["Targets"]) == len(results["targets"])
    assert len(shown["Prompt and output"]) == len(results["figures"])
