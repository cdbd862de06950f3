#!/usr/bin/env python3
"""A long job under faults: are all summaries there, once, in order, and the same as without them?

    python scripts/soak.py                     20,000 short texts, some minutes; writes docs/reliability.md
    python scripts/soak.py --texts 400 --batch-size 4

The demo model summarises the same texts twice with fairseq-el summarize: once undisturbed, and once killed
(SIGKILL) again and again at random moments and started again with --resume, while allocations fail at random
decoding steps. Among the texts are blank ones and such as make trouble elsewhere: NUL bytes, half characters,
one word of thousands of letters. Both files must be the same, byte for byte.

Memory is that of the undisturbed process, after the first sixtieth of its batches and after the last.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
PAGE = ROOT / "docs" / "reliability.md"

ROUNDING = 2e-4  # of scores, which are written with four digits
ALLOCATION_FAILS = 0.002  # of all decoding steps
BATCHES_TO_LIVE = 30, 300  # that a process finishes before it is killed: least, most
ODD_TEXTS = ["", "   ", "\x00\x00", "\ud83d half of a character", "\u202eright to left", "x" * 5000]


# ---- the texts


def write_texts(path: Path, count: int) -> None:
    """Beginnings of the demo's texts, no two alike, and one in a hundred odd."""
    sources = (ROOT / "demo" / "test.source").read_text(encoding="utf-8").splitlines()
    numbers = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            if number % 100 == 99:
                text = ODD_TEXTS[number // 100 % len(ODD_TEXTS)]
            else:
                words = sources[number % len(sources)].split()
                start = numbers.randrange(max(1, len(words) - 12))
                text = f"{' '.join(words[start : start + 12])} version {number}"
            file.write(json.dumps({"id": number, "text": text}) + "\n")


# ---- a process that summarises, with faults of its own


def run_worker(args: argparse.Namespace) -> None:
    """`fairseq-el summarize` in this process, with a model that fails at random and tells its memory."""
    from fairseq_el.cli.main import main
    from fairseq_el.jobs.summarizer import Summarizer

    load = Summarizer.load

    def load_watched(*words: Any, **options: Any) -> Summarizer:
        summarizer = load(*words, **options)
        if args.faults:
            fail_at_random(summarizer.generator.model, random.Random(args.faults))
        watch_memory(summarizer, args.folder / "memory.txt")
        return summarizer

    Summarizer.load = load_watched
    main(["summarize", *summarize_words(args), "--output", str(args.output), *["--resume"] * args.resume])


def fail_at_random(model: Any, numbers: random.Random) -> None:
    decode = model.forward_decoder

    def forward_decoder(*words: Any, **options: Any) -> Any:
        if numbers.random() < ALLOCATION_FAILS:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory (as the soak test wants it)")
        return decode(*words, **options)

    model.forward_decoder = forward_decoder


def watch_memory(summarizer: Any, log: Path) -> None:
    """Writes a line a batch: the resident size of this process, in bytes."""
    infer = summarizer.task.inference_step
    file = log.open("w", buffering=1)

    def inference_step(*words: Any, **options: Any) -> Any:
        found = infer(*words, **options)
        print(resident_bytes(), file=file)
        return found

    summarizer.task.inference_step = inference_step


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(field.split()[1]) << 10 for field in fields if field.startswith("VmRSS"))


def summarize_words(args: argparse.Namespace) -> list[str]:
    return [
        "--model", "demo", "--preset", "demo", "--search", "greedy", "--max-len-b", "10", "--window", "512",
        "--batch-size", str(args.batch_size), "--input", str(args.folder / "texts.jsonl"), "--cpu",
    ]  # fmt: skip


# ---- the two runs


def start(args: argparse.Namespace, output: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--folder", str(args.folder), "--batch-size", str(args.batch_size)]
    log = (args.folder / f"{output.stem}.log").open("a")
    return subprocess.Popen([*command, "--output", str(output), *words], stderr=log, stdout=log)


def run_undisturbed(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    code = start(args, args.folder / "undisturbed.jsonl").wait()
    if code:
        sys.exit(f"soak: the undisturbed run failed: see {args.folder / 'undisturbed.log'}")
    memory = [int(line) for line in (args.folder / "memory.txt").read_text().split()]
    minute = memory[len(memory) // 60]
    return {
        "seconds": time.monotonic() - began,
        "batches": len(memory),
        "memory_after_a_sixtieth": minute,
        "memory_at_the_end": memory[-1],
        "growth": memory[-1] / minute - 1,
    }


def run_disturbed(args: argparse.Namespace) -> dict[str, Any]:
    numbers, output = random.Random(2), args.folder / "disturbed.jsonl"
    began, kills, starts = time.monotonic(), 0, 0
    while not output.exists():
        starts += 1
        worker = start(args, output, "--faults", str(starts), *["--resume"] * (starts > 1))
        if lives_on(worker, args.folder / "memory.txt", numbers.randint(*args.batches_to_live)):
            worker.kill()
        code = worker.wait()
        kills += code < 0
        if code > 0:
            sys.exit(f"soak: the disturbed run failed: see {args.folder / 'disturbed.log'}")
    failed = (args.folder / "disturbed.log").read_text().count("memory does not suffice")
    return {"seconds": time.monotonic() - began, "kills": kills, "runs_with_failed_allocations": failed}


def lives_on(worker: subprocess.Popen, log: Path, batches: int) -> bool:
    """Waits until a process has finished so many batches or, then False, has ended."""
    log.unlink(missing_ok=True)
    while worker.poll() is None:
        if log.exists() and log.read_text().count("\n") >= batches:
            time.sleep(random.random() / 10)  # to be somewhere in the next one
            return True
        time.sleep(0.05)
    return False


def differ(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Scores of batches that were halved differ by rounding."""
    scores = [record.get("score") or 0.0 for record in (mine, other)]
    return mine | {"score": None} != other | {"score": None} or abs(scores[0] - scores[1]) > ROUNDING


def compare(folder: Path, count: int) -> dict[str, int]:
    """Of the disturbed run, against the texts that went in and the undisturbed run."""
    undisturbed, disturbed = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("undisturbed", "disturbed")
    )
    ids = [record["id"] for record in disturbed]
    return {
        "lost": len(set(range(count)) - set(ids)),
        "duplicated": len(ids) - len(set(ids)),
        "out_of_order": sum(first > second for first, second in zip(ids, ids[1:])),
        "different": sum(differ(mine, other) for mine, other in zip(disturbed, undisturbed))
        + abs(len(disturbed) - len(undisturbed)),
        "summaries": sum(bool(record["summary"]) for record in disturbed),
    }


# ---- the report


def render(results: dict[str, Any]) -> str:
    from bench.report import megabytes, run_facts, table

    calm, rough, found = results["undisturbed"], results["disturbed"], results["found"]
    rows = [
        ["texts", f"{results['texts']:,}"],
        ["of which with a summary (the others are blank)", f"{found['summaries']:,}"],
        ["processes killed on the way", f"{rough['kills']}"],
        ["processes with failed allocations, whose batches were halved", f"{rough['runs_with_failed_allocations']}"],
        ["lost", f"{found['lost']}"],
        ["duplicated", f"{found['duplicated']}"],
        ["out of order", f"{found['out_of_order']}"],
        ["different from the undisturbed run", f"{found['different']}"],
        ["batches of the undisturbed process", f"{calm['batches']:,}"],
        ["its memory after a sixtieth of them", megabytes(calm["memory_after_a_sixtieth"])],
        ["its memory at the end", megabytes(calm["memory_at_the_end"])],
        ["growth", f"{calm['growth']:+.1%}"],
    ]
    return f"{run_facts(results)}\n\n{table(['', 'measured'], rows)}"


def soak(args: argparse.Namespace) -> dict[str, Any]:
    from bench.environment import describe

    args.folder.mkdir(parents=True, exist_ok=True)
    for old in args.folder.iterdir():
        old.unlink()
    write_texts(args.folder / "texts.jsonl", args.texts)
    print(f"undisturbed: {args.texts:,} texts", flush=True)
    calm = run_undisturbed(args)
    print(f"disturbed: took {calm['seconds']:.0f} s without", flush=True)
    rough = run_disturbed(args)
    results = {
        "environment": describe({}) | {"command": f"scripts/soak.py --texts {args.texts}"},
        "texts": args.texts,
        "undisturbed": calm,
        "disturbed": rough,
        "found": compare(args.folder, args.texts),
    }
    (args.folder / "soak.json").write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--texts", type=int, default=20_000, help="how many (default: 20,000)")
    add("--batch-size", type=int, default=8, help="texts at a time (default: 8)")
    add("--batches-to-live", type=int, nargs=2, default=BATCHES_TO_LIVE, help="of a process: least, most")
    add("--folder", type=Path, default=ROOT / "build" / "soak", help="for texts, summaries and logs")
    add("--page", type=Path, default=PAGE, help="where the figures go (default: docs/reliability.md)")
    # of the processes that this one starts
    add("--output", type=Path, help=argparse.SUPPRESS)
    add("--faults", type=int, help=argparse.SUPPRESS)
    add("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.output:
        return run_worker(args)
    results = soak(args)
    from bench.report import replace_section

    text = render(results)
    replace_section(args.page, "soak", text)
    print(text)
    found = results["found"]
    if any(found[name] for name in ("lost", "duplicated", "out_of_order", "different")):
        sys.exit("soak: the disturbed run did not end as the undisturbed one")


if __name__ == "__main__":
    main()
