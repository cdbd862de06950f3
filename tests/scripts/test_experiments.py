"""The paper's experiments at toy size: they show what was counted and measured, and count it right."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest
import torch
from matplotlib.colors import to_rgb

import benchmark
from bench import experiment, figure3, figure4, forms, plots, table1, table4
from bench.counting import count
from fairseq_el.models.costs import Cost, Shape
from helpers import number, parse_tables

NAMES = ("table1", "figure3", "figure4", "table4")  # those of test_tables.py need more workers
REPEATS = 2
GIB = 2**30


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of one quick run of all of them; JSON and plots lie beside it."""
    threads = torch.get_num_threads()
    output = tmp_path_factory.mktemp("experiments")
    for name in NAMES:
        benchmark.main([name, "--quick", "--repeats", str(REPEATS), "--output", str(output)])
    torch.set_num_threads(threads)
    return output / "benchmarks.md"


@pytest.fixture(scope="module")
def tables(page) -> dict[str, list[dict[str, str]]]:
    return parse_tables(page.read_text())


@pytest.fixture
def results(page):
    return lambda name: json.loads((page.parent / f"{name}.json").read_text())


# --- what is counted ---------------------------------------------------------------------------


def multi_head_bytes(b: int, x: int, n: int, h: int, d: int, owners: int) -> int:
    """K and V of all owners, queries in and context out, scores written and weights read."""
    return 4 * (2 * owners * n * d + 2 * b * x * d + 2 * b * x * h * n)


def test_operations_do_the_arithmetic_and_move_the_bytes_of_the_papers_table(results):
    b, x, n, h, d = 2, 4, 32, 4, 64
    assert asdict(table1.QUICK) == {"batch": b, "beam": x, "length": n, "heads": h, "width": d}
    counted = {r["work"]: r for r in results("table1")["records"] if r["kind"] == "operation"}
    assert {name: r["flops"] for name, r in counted.items()} == {
        "build copied": 4 * b * x * n * d * d,
        "build shared": 4 * b * n * d * d,
        "project multi-head": 4 * b * x * d * d,
        "project el": 8 * b * x * d * d,
        "attend copied": 4 * b * x * n * d,
        "attend shared": 4 * b * x * n * d,
        "attend el": 4 * h * b * x * n * d,
    }
    moved = {name: r["bytes"] for name, r in counted.items()}
    biases = 2 * d
    assert moved["build copied"] == 4 * (4 * b * x * n * d + 2 * d * d + biases)
    assert moved["build shared"] == 4 * (4 * b * n * d + 2 * d * d)  # V's bias is added apart
    assert moved["project multi-head"] == 4 * (4 * b * x * d + 2 * d * d + biases)
    assert moved["attend copied"] == multi_head_bytes(b, x, n, h, d, owners=b * x)
    assert moved["attend shared"] == multi_head_bytes(b, x, n, h, d, owners=b)
    assert moved["attend el"] == 4 * (2 * b * n * d + 2 * b * x * h * (d + n))
    assert all(r["all_bytes"] >= r["bytes"] for r in counted.values())


def test_formula_and_count_agree_in_every_line_and_the_page_says_so(results, page):
    made = results("table1")["figures"]
    assert all(row["flops"] == row["counted_flops"] for row in made["lines"] + made["steps"])
    assert "Counted FLOPs equal the formula's in every line" in page.read_text()
    wrong = [made["lines"][0] | {"counted_flops": 1}]
    assert "differ" in table1.flops_sentence(wrong) and made["lines"][0]["form"] in table1.flops_sentence(wrong)


def test_a_step_with_cache_and_a_step_of_el_build_nothing(results):
    idle = [row for row in results("table1")["figures"]["lines"] if row["flops"] == 0]
    assert [row["form"].split(",")[0] for row in idle] == ["multi-head", "multi-head", "EL"]
    for row in idle:
        assert row["counted_flops"] == 0
        assert abs(row["counted_bytes"]) < 200  # biases


def test_all_forms_of_attention_compute_the_same():
    works = forms.whole_steps(Shape(batch=3, beam=4, length=40, heads=4, width=64))
    with torch.no_grad():
        expected = works.pop("no-cache")()
        assert expected.shape == (1, 12, 64) and set(works) == set(forms.FORMS) - {"no-cache"}
        for form, work in works.items():
            torch.testing.assert_close(work(), expected, msg=form)


def test_groups_of_operations_compute_the_same_with_and_without_copies():
    works = forms.operations(Shape(batch=3, beam=4, length=40, heads=4, width=64))
    with torch.no_grad():
        shared = works["attend shared"]()  # [b, x, d]
        torch.testing.assert_close(works["attend copied"]().view_as(shared), shared)
        keys = works["build shared"]()[0]  # [b, h, d_k, n], without the key's bias
        copies = works["build copied"]()[0].view(40, 3, 4, 4, 16)[:, :, 1]  # of beam 1: [n, b, h, d_k]
        difference = copies.permute(1, 2, 3, 0) - keys
        torch.testing.assert_close(difference, difference[..., :1].expand_as(difference), atol=1e-5, rtol=0)


def test_traffic_is_what_is_read_and_written_and_views_are_free():
    a, b = torch.randn(6, 8), torch.randn(8, 10)
    assert count(lambda: a @ b) == {"flops": 960, "bytes": 4 * (48 + 80 + 60), "all_bytes": 4 * (48 + 80 + 60)}
    assert count(lambda: a.t().view(2, 4, 6)[0].unsqueeze(0).expand(5, 4, 6))["all_bytes"] == 0
    assert count(lambda: a.mul_(2)) == {"flops": 0, "bytes": 0, "all_bytes": 4 * (48 + 48)}
    assert count(lambda: torch.empty(100))["all_bytes"] == 0
    shared = b.expand(3, 8, 10)
    assert count(lambda: torch.bmm(torch.ones(3, 6, 8), shared))["bytes"] == 4 * (144 + 80 + 180)


# --- source state ------------------------------------------------------------------------------


def test_source_state_measured_from_live_tensors_is_the_formulas(results):
    settings = table4.QUICK
    rows = results("table4")["figures"]["rows"]
    assert [(r["batch"], r["length"]) for r in rows] == [(b, n) for b in settings.batches for n in settings.lengths]
    for row in rows:
        states = row["batch"] * row["length"] * settings.width * 4
        shared = 2 * settings.layers * states
        expected = {"stock-copied": settings.beam * shared, "stock": shared, "el": states}
        assert row["measured"] == expected == row["single"]
        assert {system: 2 * size for system, size in row["half"].items()} == expected


def test_the_papers_table_of_source_state_is_ours_rounded_but_for_one_number():
    made = table4.figures(table4.Settings(), [{"figure": "limit", "bytes": 0}])
    assert len(made["rows"]) == len(table4.PAPER)
    for row in made["rows"]:
        multi_head, el = (float(words) for words in table4.PAPER[row["batch"], row["length"]])
        assert row["half"]["stock-copied"] / GIB == multi_head
        assert row["half"]["el"] / GIB == pytest.approx(el, abs=0.0065)
    assert table4.paper_sentence(made["rows"]).count("there") == 1
    assert "batch 320, n = 256: 0.15 there, 0.1562 here" in table4.paper_sentence(made["rows"])


def test_states_that_do_not_fit_are_neither_measured_nor_hidden():
    settings = table4.QUICK
    limit = settings.formula("stock", 2, 16, element_size=4)
    asked = [(s, r.batch, r.source_length) for c in table4.plan(settings, limit) for s, r in c.requests]
    assert ("stock", 2, 16) in asked and ("stock-copied", 2, 16) not in asked and ("stock", 3, 16) not in asked
    made = table4.figures(settings, [{"figure": "limit", "bytes": limit}])
    assert "does not fit" in table4.measured_table(made["rows"])


# --- time ----------------------------------------------------------------------------------------


def test_what_is_compared_runs_in_turns_after_a_round_to_warm_up():
    calls: list[str] = []

    def set_up():
        calls.append("set up")
        return {name: lambda name=name: calls.append(name) for name in "ab"}

    costs = {name: Cost(1, 1) for name in "ab"}
    works = [experiment.Comparison({"n": n}, costs, set_up) for n in (1, 2)]
    records = experiment.time_interleaved(works, repeats=2, least_seconds=0.0)
    assert calls == ["set up", *"ababab"] * 2
    assert [(r["n"], r["work"], r["repeat"]) for r in records] == [
        (n, work, repeat) for n in (1, 2) for repeat in (0, 1) for work in "ab"
    ]


@pytest.mark.parametrize(("takes", "calls"), [(3.0, 4), (20.0, 1)])
def test_a_short_piece_of_work_is_repeated_and_its_time_is_that_of_one_call(monkeypatch, takes, calls):
    clock = [100.0]
    monkeypatch.setattr(experiment.time, "perf_counter", lambda: clock[-1])
    seconds = experiment.seconds_per_call(lambda: clock.append(clock[-1] + takes), least_seconds=10.0)
    assert (seconds, len(clock) - 1) == (takes, calls)


def test_times_are_medians_of_the_rounds_for_one_sample(results):
    made = results("figure4")
    settings = figure4.QUICK
    assert len(made["figures"]["rows"]) == len(settings.points())
    for row in made["figures"]["rows"]:
        shape = settings.shape(row["length"], row["beam"])
        assert row["batch"] == shape.batch == settings.tokens_times_beams // (row["length"] * row["beam"])
        cell = [r for r in made["records"] if (r.get("length"), r.get("beam")) == (row["length"], row["beam"])]
        for form in forms.FORMS:
            seconds = [r["seconds"] / shape.batch for r in cell if r["work"] == form]
            assert len(seconds) == REPEATS
            assert row["seconds"][form]["median"] == pytest.approx(statistics.median(seconds))
        ours = row["seconds"]["el"]["median"]
        assert row["el_faster"]["copied"] == pytest.approx(row["seconds"]["copied"]["median"] / ours)


def test_the_full_figures_have_the_papers_shapes():
    shape = figure3.EXPERIMENT.settings.shape()
    assert (shape.batch, shape.beam, shape.length, shape.heads, shape.width) == (32, 4, 1024, 16, 1024)
    lengths = [(n, 4) for n in (64, 128, 256, 512, 1024)]
    assert figure4.EXPERIMENT.settings.points() == lengths + [(1024, x) for x in (1, 2, 8)]


def figure4_results(el: float, copied: float, balance: float = 5.0) -> dict:
    """As if every shape took the same times."""
    seconds = dict.fromkeys(forms.FORMS, 1.0) | {"el": el, "copied": copied, "build": 10.0, "shared-kernel": 0.5}
    settings = figure4.Settings()
    records = [
        {"kind": "time", "length": n, "beam": x, "batch": 1, "work": work, "seconds": time}
        for n, x in settings.points()
        for work, time in seconds.items()
    ]
    machine = {"kind": "peaks", "flops_per_second": balance * 1e9, "bytes_per_second": 1e9}
    made = figure4.figures(settings, [*records, machine])
    return json.loads(json.dumps({"settings": asdict(settings), "figures": made}))


def test_a_disagreement_with_the_paper_is_said_with_its_reason_and_agreement_is_said_too():
    apart = figure4.copied_sentence(figure4_results(el=2.0, copied=1.0))
    assert "0.50 to 0.50" in apart and "(paper: 1.4 to 5)" in apart and "5.0 FLOPs in the time it reads a byte" in apart
    agreed = figure4.copied_sentence(figure4_results(el=1.0, copied=3.0))
    assert "As in the paper" in agreed and "byte" not in agreed


def test_building_keys_and_values_pays_once_the_steps_they_save_add_up():
    rows = figure4_results(el=2.5, copied=1.0)["figures"]["rows"]
    assert {row["steps_to_pay_for_building"] for row in rows} == {10.0 / (2.5 - 0.5)}
    rows = figure4_results(el=0.25, copied=1.0)["figures"]["rows"]
    assert {row["steps_to_pay_for_building"] for row in rows} == {None}


# --- what is shown -------------------------------------------------------------------------------


def test_every_experiment_has_its_tables_on_the_page(tables):
    assert {name: len(rows) for name, rows in tables.items()} == {
        "Three groups of operations": len(table1.LINES),
        "A whole step": 4,
        "Half precision, beside the paper": 4,
        "Single precision, measured": 4,
        "Operations": 7,
        "Against the source length, beam 2": 2,
        "Against the beam size, n = 32": 2,
    }


def test_a_number_shown_is_the_number_in_the_json(tables, results):
    def close(shown: str, value: float) -> bool:
        return float(shown) == pytest.approx(value, rel=6e-4)

    for shown, row in zip(tables["Three groups of operations"], results("table1")["figures"]["lines"], strict=True):
        assert close(shown["GFLOP, counted"], row["counted_flops"] / 1e9)
        assert close(shown["GB, formula"], row["bytes"] / 1e9)
        assert close(shown["GB, counted"], row["counted_bytes"] / 1e9)
    for shown, row in zip(tables["Single precision, measured"], results("table4")["figures"]["rows"], strict=True):
        assert shown["batch and source"] == f"batch {row['batch']}, n = {row['length']}"
        assert close(shown["cache copied per beam: measured"], row["measured"]["stock-copied"] / GIB)
        assert close(shown["fairseq_el: measured"], row["measured"]["el"] / GIB)
    for shown, row in zip(tables["Operations"], results("figure3")["figures"]["operations"], strict=True):
        assert number(shown["ms"]) == pytest.approx(1000 * row["seconds"]["median"], abs=0.0501)
        assert close(shown["GFLOP"], row["flops"] / 1e9) and close(shown["GB in half precision"], row["bytes"] / 2e9)
    rows = {(row["length"], row["beam"]): row for row in results("figure4")["figures"]["rows"]}
    for shown in tables["Against the source length, beam 2"]:
        row = rows[int(shown["n"]), 2]
        for form, title in figure4.COLUMNS.items():
            assert number(shown[title]) == pytest.approx(1000 * row["seconds"][form]["median"], abs=0.000501)
        assert number(shown["EL to copied"]) == pytest.approx(row["el_faster"]["copied"], abs=0.00501)


def test_the_papers_numbers_stand_beside_ours():
    assert list(figure4.COLUMNS) == list(forms.FORMS)
    text = figure4.half_table("n", "length", figure4_results(2.0, 1.0)["figures"]["rows"], figure4.PAPER_BY_LENGTH)
    assert "1.4x" in text.splitlines()[2] and "5x" in text
    made = table4.figures(table4.Settings(), [{"figure": "limit", "bytes": 0}])
    for multi_head, el in table4.PAPER.values():
        assert f"| {multi_head} |" in " ".join(table4.half_table(made["rows"]).split())
        assert f"| {el} |" in " ".join(table4.half_table(made["rows"]).split())


@pytest.mark.parametrize("name", ["figure3", "figure4"])
def test_a_plot_is_a_picture_in_which_every_form_can_be_seen(page, name):
    assert f"({name}.png)" in page.read_text() and f"({name}.svg)" in page.read_text()
    picture = matplotlib.image.imread(page.with_name(f"{name}.png"))[..., :3]
    height, width, _ = picture.shape
    assert width > 1000 and height > 500
    if name == "figure4":  # lines are opaque
        for form in forms.FORMS:
            painted = abs(picture - to_rgb(plots.COLOURS[form])).max(axis=2) < 0.02
            assert painted.sum() > 100, form
    ink = (picture.min(axis=2) < 0.9).mean()
    assert 0.01 < ink < 0.5
    drawing = ElementTree.parse(page.with_name(f"{name}.svg"))
    texts = [node.text for node in drawing.iter() if node.tag.endswith("}text")]
    labels = forms.FORMS.values() if name == "figure4" else ["attention,", "K and V,", "per beam", "GFLOP"]
    assert all(any(label in (text or "") for text in texts) for label in labels)


def test_page_and_plot_are_made_again_from_the_json_without_measuring(page, tmp_path, monkeypatch):
    def measured(*_):
        raise AssertionError("something was measured")

    monkeypatch.setattr(experiment, "time_interleaved", measured)
    again = tmp_path / "benchmarks.md"
    for name in NAMES:
        benchmark.show(page.parent / f"{name}.json", again)
    assert again.read_text() == page.read_text()
    for plot in ("figure3.svg", "figure4.svg", "figure3.png", "figure4.png"):
        assert (tmp_path / plot).read_bytes() == page.with_name(plot).read_bytes()


def test_results_name_machine_versions_and_settings(results):
    for name in NAMES:
        found = results(name)
        assert found["quick"] and found["experiment"] == name
        assert found["environment"]["machine"] and {"torch", "fairseq"} <= set(found["environment"]["versions"])
        module = {"table1": table1, "table4": table4, "figure3": figure3, "figure4": figure4}[name]
        expected = json.loads(json.dumps(asdict(module.QUICK)))
        assert found["settings"] == expected | {"repeats": REPEATS}


def test_a_bubble_is_as_large_as_its_time(results):
    made = results("figure3")
    for row in made["figures"]["operations"]:
        row["seconds"] = {"median": 4.0 if row["operation"] == "attend el" else 1.0}
    (axes,) = figure3.draw(made).axes
    sizes = sorted(float(bubbles.get_sizes()[0]) for bubbles in axes.collections if len(bubbles.get_sizes()))
    assert len(sizes) == 7 and sizes[-1] == pytest.approx(4 * sizes[0]) and sizes[-2] == pytest.approx(sizes[0])
