#!/usr/bin/env python3
"""Measures fairseq_el beside other systems, and writes what it finds as JSON and Markdown.

scripts/benchmark.py generator          the generator beside stock fairseq and other systems
scripts/benchmark.py gpt2               language models with long prompts, beside the same
scripts/benchmark.py table1             an experiment of the paper beside ours: table1 to table5, figure3, figure4
scripts/benchmark.py peers, growth      the paper's tasks beside other systems; what time and memory grow with
scripts/benchmark.py gpu-model          a prediction of the paper's GPU figures from counted kernels, in docs/gpu.md
scripts/benchmark.py prepare            makes the checkpoints and the environment of the other systems, once
scripts/benchmark.py all                all experiments of the paper, peers and growth; --quick: at toy size, in minutes
scripts/benchmark.py table2 --plan      prints what would be measured and how long it takes
scripts/benchmark.py peers --rest       measures what the last run had no time for
scripts/benchmark.py generator --figures auto    measures one figure again and keeps the others
scripts/benchmark.py report             writes docs/benchmarks.md again from the JSON of earlier runs

Results of full runs go to build/benchmark, and without the single measurements to docs/results; those of --quick go
to build/benchmark/quick, page included.
"""
# Over 400 lines: the commands of all experiments, which are told apart here and nowhere else.

import argparse
import importlib
import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import driver, generator, generator_report, language
from bench.checkpoints import Checkpoint
from bench.environment import BUILD, ROOT, describe, ensure_peers
from bench.report import replace_section
from bench.systems import LANGUAGE_SYSTEMS, SYSTEMS, SystemKind

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"  # of full runs, for a page that can be made again from a fresh clone


def run_generator(args: argparse.Namespace) -> None:
    settings = generator.QUICK if args.quick else generator.Settings()
    kinds = chosen(SYSTEMS, args)
    prepare(settings.checkpoint, kinds)
    cells = generator.plan(settings, kinds, args.figures)
    loaded, records = driver.run(
        kinds, cells, args.repeats, settings.checkpoint, logs=args.output / "logs"
    )
    environment = describe(loaded)
    measured = dict.fromkeys([*args.figures, "loading"], environment)
    earlier = earlier_results(args, settings)
    if earlier:  # what is not measured this time stays as it was
        records += [r for r in earlier["records"] if r["figure"] not in args.figures]
        measured |= {name: run for name, run in earlier["measured"].items() if name not in args.figures}
    made = generator.figures(settings, loaded, records)
    if earlier:
        made["loading"] = earlier["figures"]["loading"]
    results = {
        "measured": measured,
        "figures": made,
        "targets": generator.targets(settings, made),
        "records": records,
    }
    write(args, "generator", asdict(settings), environment, results)


def earlier_results(args: argparse.Namespace, settings: generator.Settings) -> dict | None:
    """Results to add to, where this run measures only some figures."""
    if set(args.figures) == set(generator.FIGURES):
        return None
    earlier = read_results(args, "generator", settings)
    if earlier and "measured" not in earlier:
        earlier["measured"] = dict.fromkeys([*generator.FIGURES, "loading"], earlier["environment"])
    return earlier


def read_results(args: argparse.Namespace, experiment: str, settings) -> dict | None:
    """What an earlier run with the same settings has written."""
    file = args.output / f"{experiment}.json"
    if not file.exists():
        return None
    earlier = json.loads(file.read_text())
    same = json.loads(json.dumps(asdict(settings)))
    return earlier if {k: v for k, v in earlier["settings"].items() if k != "repeats"} == same else None


def run_gpt2(args: argparse.Namespace) -> None:
    """One model after the other; each has a section and a file of its own, written when it is done."""
    settings = language.QUICK if args.quick else language.Settings()
    kinds = chosen(LANGUAGE_SYSTEMS, args)
    for name in args.models or settings.checkpoints:
        checkpoint = settings.checkpoints[name]
        prepare(checkpoint, kinds)
        beams = tuple(args.beams or settings.beams)
        cells = language.plan(replace(settings, beams=beams), kinds)
        rounds = settings.rounds(name, args.repeats)
        loaded, records = driver.run(kinds, cells, rounds, checkpoint, logs=args.output / "logs")
        environment = describe(loaded)
        measured = {f"beam {beam}": environment for beam in beams}
        earlier = read_results(args, language.section(name), settings) if set(beams) < set(settings.beams) else None
        if earlier:  # what is not measured this time stays as it was
            records = [record for record in earlier["records"] if record["beam"] not in beams] + records
            measured = earlier.get("measured", {}) | measured
        rows = language.figures(settings, name, records)
        results = {
            "model": name, "measured": measured, "figures": rows, "targets": language.targets(settings, rows),
            "records": records,
        }  # fmt: skip
        write(args, language.section(name), asdict(settings), environment, results)


def chosen(systems: dict[str, SystemKind], args: argparse.Namespace) -> list[SystemKind]:
    """Toy runs leave out what needs an environment of its own."""
    names = args.systems or [n for n, kind in systems.items() if not (args.quick and kind.needs_peers)]
    return [systems[name] for name in names]


def prepare(checkpoint: Checkpoint, kinds: list[SystemKind]) -> None:
    checkpoint.ensure()
    if any(kind.needs_peers for kind in kinds):
        ensure_peers()
        checkpoint.ensure_converted()


# Each a module of its name, with the minutes that it takes, or is given, of a run of all. What takes as long as it
# takes comes first; the last one gets what is left.
EXPERIMENTS = {
    "table1": ("FLOPs and bytes of attention's operations, by formula and counted", 1),
    "figure3": ("FLOPs, bytes and time of attention's operations", 2),
    "figure4": ("time of attention against the source length and the beam size", 2),
    "table4": ("bytes of source state, by formula and measured", 4),
    "table5": ("ROUGE of stock fairseq and of fairseq_el, weights in single and half precision", 1),
    "table2": ("sentences per second of the paper's models and tasks", 32),
    "table3": ("sentences per second by batch size", 3),
    "growth": ("what time and memory grow with", 4),
    "peers": ("the paper's tasks beside other systems", 9),
}
TIMED = ("table2", "table3", "growth", "peers")  # keep to the minutes they are given
MINUTES = 58  # of a run of all


def load_experiment(name: str) -> Any:
    """Imports on demand: some experiments need torch, which the others leave to their workers."""
    return importlib.import_module(f"bench.{name}").EXPERIMENT


def run_experiment(args: argparse.Namespace) -> None:
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # it lists what it could also use
    from fairseq_el.errors import UserError

    try:
        measure_experiment(args)
    except UserError as error:
        sys.exit(f"benchmark: {error}")


def measure_experiment(args: argparse.Namespace) -> None:
    experiment = load_experiment(args.experiment)
    settings = with_options(experiment.quick if args.quick else experiment.settings, args)
    if getattr(args, "plan", False):
        print_plan(experiment.time_plan(settings, args.repeats))
        return
    if getattr(args, "rest", False):
        measure_rest(experiment, settings, args)
        return
    loaded, records = experiment.measure(settings, args.repeats, args.output / "logs")
    results = {"figures": experiment.figures(settings, records), "records": records}
    write(args, experiment.name, asdict(settings), describe(loaded), results)


def measure_rest(experiment: Any, settings: Any, args: argparse.Namespace) -> None:
    """Goes on from the last run of the same code on the same machine."""
    from bench.pool import LEFT_OUT

    file = args.output / f"{experiment.name}.json"
    earlier = json.loads(file.read_text()) if file.exists() else None
    check_same_run(earlier, experiment.name, describe({}))
    known = [record for record in earlier["records"] if record.get("left_out") != LEFT_OUT]
    loaded, records = experiment.measure(settings, args.repeats, args.output / "logs", known)
    environment = describe(loaded)
    environment["versions"] = earlier["environment"]["versions"] | environment["versions"]
    words = f"{len(known)} of {len(records)} measurements"
    measured = earlier.get("measured", {}) | {words: earlier["environment"]}
    results = {"measured": measured, "figures": experiment.figures(settings, records), "records": records}
    write(args, experiment.name, asdict(settings), environment, results)


def check_same_run(earlier: dict[str, Any] | None, experiment: str, now: dict[str, Any]) -> None:
    from fairseq_el.errors import UserError

    if earlier is None:
        raise UserError(f"there is no run of {experiment} to go on from: leave out --rest")
    for name in ("commit", "machine", "system"):
        before = earlier["environment"][name]
        if before != now[name]:
            raise UserError(f"the last run of {experiment} was with {name} {before}, not {now[name]}: leave out --rest")


def with_options(settings: Any, args: argparse.Namespace) -> Any:
    """The settings as the command line changes them."""
    from bench.tasks import with_checkpoint

    given = {name: value for name in ("minutes", "data", "preset") if (value := getattr(args, name, None))}
    if getattr(args, "systems", None):
        given["systems"] = tuple(args.systems)
    if getattr(args, "tasks", None):
        given["tasks"] = tuple(task for task in settings.tasks if task.name in args.tasks)
    if getattr(args, "path", None):
        if args.experiment == "table5":
            given["path"] = str(args.path)
        else:
            given["tasks"] = with_checkpoint(given.get("tasks", settings.tasks), args.path)
    return replace(settings, **given)


def print_plan(plan: list[tuple[str, float]]) -> None:
    for what, seconds in plan:
        print(f"{seconds:7.1f} s  {what}")
    print(f"{sum(seconds for _, seconds in plan) / 60:7.1f} minutes")


def run_all(args: argparse.Namespace) -> None:
    """Each in a process of its own, so that nothing one leaves behind, or its end, is the next one's."""
    started, failed = time.monotonic(), []
    for number, (name, (words, _)) in enumerate(EXPERIMENTS.items(), start=1):
        passed = (time.monotonic() - started) / 60
        command = [sys.executable, str(Path(__file__).resolve()), name, *(["--quick"] if args.quick else [])]
        command += ["--repeats", str(args.repeats)]
        if args.output != default_output(args.quick):  # pages name their command, and should name no folder for it
            command += ["--output", str(args.output)]
        if name in TIMED and not args.quick:
            command += ["--minutes", f"{minutes_for(name, passed):.1f}"]
        left = "" if args.quick else f", at most {MINUTES - passed:.0f} left"
        print(f"\n[{number}/{len(EXPERIMENTS)}] {name}: {words} ({passed:.0f} minutes so far{left})", flush=True)
        if subprocess.run(command).returncode != 0:
            failed.append(name)
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")
    if failed:
        sys.exit(f"benchmark: {', '.join(failed)} failed; the others are done")


def minutes_for(experiment: str, passed: float) -> float:
    """Its share, or less where earlier ones took longer; the last one takes all that is left."""
    names = list(EXPERIMENTS)
    later = names[names.index(experiment) + 1 :]
    left = MINUTES - passed - sum(EXPERIMENTS[name][1] for name in later)
    return max(0.5, min(EXPERIMENTS[experiment][1], left) if later else left)


def run_prepare(args: argparse.Namespace) -> None:
    """Checkpoints, and their forms for other systems, take minutes to make, once."""
    from bench import peers, table4
    from bench.tasks import paper_tasks

    table4.EXPERIMENT.settings.checkpoint.ensure()
    ensure_peers()
    for model in dict.fromkeys(task.model for task in paper_tasks()):
        model.checkpoint.ensure()
        if peers.is_convertible(model):
            model.checkpoint.ensure_converted()


def run_gpu_model(args: argparse.Namespace) -> None:
    """Counts kernels at the paper's sizes, for about ten minutes, and writes docs/gpu.md."""
    from bench import gpu_model, gpu_report
    from bench.tasks import paper_tasks

    logging.getLogger("fairseq").setLevel(logging.WARNING)
    results = gpu_model.predict(paper_tasks())
    (args.output / "gpu-model.json").write_text(json.dumps(results, indent=1) + "\n")
    replace_section(ROOT / "docs" / "gpu.md", "gpu-model", gpu_report.render(results))


LANGUAGE_MODELS = [*language.Settings().checkpoints, *language.QUICK.checkpoints]
RENDER = {
    "generator": generator_report.render,
    **{language.section(model): language.render for model in LANGUAGE_MODELS},
}


def write(
    args: argparse.Namespace, experiment: str, settings: dict, environment: dict, results: dict
) -> None:
    facts = {
        "experiment": experiment,
        "quick": args.quick,
        "environment": environment,
        "settings": settings | {"repeats": args.repeats},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    results_file = args.output / f"{experiment}.json"
    results_file.write_text(json.dumps(facts | results, indent=1))
    if not args.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in results.items() if name != "records"}
        (RESULTS / f"{experiment}.json").write_text(json.dumps(facts | kept, indent=1) + "\n")
    show(results_file, args.output / "benchmarks.md" if args.quick else PAGE)


def show(results_file: Path, page: Path) -> None:
    results = json.loads(results_file.read_text())
    name, plots = results["experiment"], []
    if name in RENDER:
        text = RENDER[name](results)
    else:
        experiment = load_experiment(name)
        text = experiment.render(results)
        plots = save_plot(experiment.draw(results), page.parent, name) if experiment.draw else []
    replace_section(page, name, text)
    print(f"{text}\n\nwritten: {', '.join(map(str, [results_file, *plots, page]))}")


def save_plot(figure: Any, folder: Path, name: str) -> list[Path]:
    from bench import plots  # where there is a figure, matplotlib is loaded

    return plots.save_plot(figure, folder, name)


def show_all(args: argparse.Namespace) -> None:
    for experiment in [*RENDER, *EXPERIMENTS]:
        if (args.output / f"{experiment}.json").exists():
            show(args.output / f"{experiment}.json", PAGE)


def parse_arguments(typed: list[str] | None) -> argparse.Namespace:
    # Over 50 lines: the table of all options.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="experiment", required=True)
    for experiment, systems, run, words in (
        ("generator", SYSTEMS, run_generator, "the generator beside its peers"),
        ("gpt2", LANGUAGE_SYSTEMS, run_gpt2, "language models with long prompts beside their peers"),
    ):
        command = add_run(commands, experiment, words, run)
        command.add_argument(
            "--systems", nargs="+", choices=systems, metavar="NAME", help=", ".join(systems)
        )
        if experiment == "gpt2":
            command.add_argument(
                "--models", nargs="+", choices=language.Settings().checkpoints, help="measure only these"
            )
            command.add_argument(
                "--beams", nargs="+", type=int, choices=language.Settings().beams,
                help="measure only these; the others stay as they were measured",
            )  # fmt: skip
        else:
            command.add_argument(
                "--figures",
                nargs="+",
                choices=generator.FIGURES,
                default=generator.FIGURES,
                help="measure only these",
            )
    for experiment, (words, _) in EXPERIMENTS.items():
        command = add_run(commands, experiment, words, run_experiment)
        if experiment in TIMED:
            add_timed_options(command, has_tasks=experiment in ("table2", "peers"))
        if experiment == "peers":
            command.add_argument("--rest", action="store_true", help="go on from the last run, with what it left out")
            command.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help="only these")
        if experiment == "table5":
            command.add_argument("--path", type=Path, help="a folder with a model, instead of the demo's")
            command.add_argument("--data", help="binarised data for --path, see fairseq-el evaluate")
            command.add_argument("--preset", help="the preset in configs/ for --path (default: cnndm)")
    command = commands.add_parser("gpu-model", help="a prediction of the paper's GPU figures; needs no GPU")
    command.set_defaults(run=run_gpu_model, output=RESULTS)
    add_run(commands, "all", "all experiments of the paper, peers and growth", run_all)
    command = commands.add_parser("prepare", help="make what all of them need and an earlier run has not made")
    command.set_defaults(run=run_prepare, output=BUILD)
    command = commands.add_parser("report", help="the page again, from results at hand")
    command.add_argument("--output", type=Path, default=RESULTS, help="folder with the JSON")
    command.set_defaults(run=show_all)
    args = parser.parse_args(typed)
    if args.output is None:
        args.output = default_output(args.quick)
    return args


def default_output(quick: bool) -> Path:
    return BUILD / "quick" if quick else BUILD


def add_run(commands: Any, experiment: str, words: str, run: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(experiment, help=words)
    command.add_argument("--quick", action="store_true", help="toy shapes, to see that it runs")
    command.add_argument("--repeats", type=int, default=3, help="rounds, where times are measured")
    command.add_argument(
        "--output", type=Path, help="folder for JSON and logs (default: build/benchmark, with --quick its quick/)"
    )
    command.set_defaults(run=run)
    return command


def add_timed_options(command: argparse.ArgumentParser, has_tasks: bool) -> None:
    command.add_argument("--minutes", type=float, help="what takes longer than this is left out")
    command.add_argument("--plan", action="store_true", help="print what takes how long, and measure nothing")
    if not has_tasks:
        return
    names = ("squad", "xsum", "cnndm", "gpt2-small", "gpt2-medium")
    command.add_argument("--tasks", nargs="+", choices=names, metavar="NAME", help=f"only these: {' '.join(names)}")
    command.add_argument("--path", type=Path, help="a checkpoint of these tasks' model, instead of random weights")


def main(typed: list[str] | None = None) -> None:
    """typed: the words of a command line; None for those of this process."""
    args = parse_arguments(typed)
    try:
        args.run(args)
    except driver.WorkerFailed as error:
        sys.exit(f"benchmark: {error}")


if __name__ == "__main__":
    main()
