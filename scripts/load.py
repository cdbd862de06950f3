#!/usr/bin/env python3
r"""Drives `fairseq-el serve` on this machine: requests per second, latencies, and what faults do to other clients.

    python scripts/load.py                                          the demo model, minutes; writes docs/reliability.md
    python scripts/load.py --model build/bart --preset cnndm --words 120 --texts 64 --max-len 60 --singles 4 \
        --rounds 1 --skip memory faults --section load-bart         BART-large's shapes (scripts/make_checkpoint.py)

The latter needs a tokenizer in the model's folder: the demo's sentencepiece.model, and dictionaries that begin with the
demo's entries and go on with others up to the number of the model's.

It starts a server of its own on a free port of the loopback interface, and sends it a bounded number of requests. Every
summary is compared with that of `Summarizer`, in this process, which also gives the speed to compare with: of a job
over all texts, and of one text at a time. Server and `Summarizer` take turns, `--rounds` times; ratios are of medians.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import faults
from serving.client import Client, Server, percentile, resident_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
PARTS = ("clients", "memory", "faults")
HEALTH_EVERY = 0.05  # seconds
SHORT_WORDS = 12  # of the texts with which memory is watched


def read_texts(args: argparse.Namespace) -> list[str]:
    texts = [line for line in args.source.read_text(encoding="utf-8").splitlines() if line.strip()]
    repeats = -(-args.words // max(1, statistics.mean(len(text.split()) for text in texts))) if args.words else 1
    texts = [" ".join(texts[number : number + int(repeats)]) for number in range(len(texts))]
    return [" ".join(text.split()[: args.words or None]) for text in texts[: args.texts]]


# ---- throughput and latency


async def drive(server: Server, texts: list[str], clients: int) -> dict[str, Any]:
    """Each text once, by clients that each wait for an answer before they send the next. Health is asked meanwhile."""
    waiting = list(enumerate(texts))[::-1]
    answers: dict[int, list[str]] = {number: [] for number in range(len(texts))}
    seconds: list[float] = []

    async def work() -> None:
        async with Client(server.port) as client:
            while waiting:
                number, text = waiting.pop()
                began = time.monotonic()
                status, answer = await client.post("/v1/summaries", {"text": text, **server.options})
                seconds.append(time.monotonic() - began)
                if status == 200:
                    answers[number].append(answer["results"][0]["summary"])

    probe = asyncio.ensure_future(ask_health(server))
    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(clients)))
    total = time.monotonic() - began
    probe.cancel()
    health = await probe
    return {"seconds": total, "latencies": seconds, "health": health, "answers": answers}


async def ask_health(server: Server) -> list[float]:
    """Seconds of each answer, until cancelled."""
    seconds = []
    try:
        async with Client(server.port) as client:
            while True:
                began = time.monotonic()
                await client.get("/health")
                seconds.append(time.monotonic() - began)
                await asyncio.sleep(HEALTH_EVERY)
    except asyncio.CancelledError:
        return seconds


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    found = work()
    return time.monotonic() - began, found


def measure_clients(server: Server, summarizer: Any, texts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    singles = texts[: args.singles]
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in args.clients}
    job_seconds, direct, served = [], [], []
    expected: list[str] = []
    summarizer(singles[:2])
    for _ in range(args.rounds):
        seconds, expected = timed(lambda: [found.summary for found in summarizer.detailed(texts)])
        job_seconds.append(seconds)
        direct += [timed(lambda text=text: summarizer.detailed(text))[0] for text in singles]
        served += asyncio.run(drive(server, singles, 1))["latencies"]
        for count, measured in runs.items():
            measured.append(asyncio.run(drive(server, texts[: len(singles)] if count == 1 else texts, count)))
    job = len(texts) / statistics.median(job_seconds)
    return {
        "texts": len(texts),
        "rounds": args.rounds,
        "job_per_second": job,
        "direct_p50": statistics.median(direct),
        "served_p50": statistics.median(served),
        "clients": [summary_of(count, measured, expected, job) for count, measured in runs.items()],
    }


def summary_of(count: int, runs: list[dict[str, Any]], expected: list[str], job: float) -> dict[str, Any]:
    latencies, health = ([value for run in runs for value in run[name]] for name in ("latencies", "health"))
    answers = [(expected[number], found) for run in runs for number, found in run["answers"].items()]
    rate = statistics.median(len(run["answers"]) / run["seconds"] for run in runs)
    return {
        "clients": count,
        "requests": len(answers),
        "per_second": rate,
        "of_job": rate / job,
        **{f"p{share}": percentile(latencies, share) for share in (50, 95, 99)},
        "health_p99": percentile(health, 99),
        "health_asked": len(health),
        "lost": sum(not found for _, found in answers),
        "twice": sum(len(found) > 1 for _, found in answers),
        "different": sum(any(summary != right for summary in found) for right, found in answers),
    }


# ---- memory


def measure_memory(server: Server, texts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Resident bytes of both processes after a twentieth of the requests, and after all."""
    words = [" ".join(text.split()[:SHORT_WORDS]) for text in texts]
    sent, seen = 0, []
    for part in range(20):
        share = args.requests // 20
        asyncio.run(drive(server, [f"{words[(sent + n) % len(words)]} {sent + n}" for n in range(share)], 64))
        sent += share
        seen.append([resident_bytes(server.pid), resident_bytes(server.worker())])
        print(f"  {sent:,} requests: {sum(seen[part]) / 1e6:.1f} MB", flush=True)
    first, last = sum(seen[0]), sum(seen[-1])
    return {"requests": sent, "first": first, "last": last, "growth": last / first - 1, "series": seen}


# ---- the report


def render(results: dict[str, Any]) -> str:
    from bench.report import megabytes, run_facts, table

    parts = [run_facts(results)]
    if found := results.get("clients"):
        rows = [
            [
                f"{row['clients']}", f"{row['per_second']:.1f}", f"{row['of_job']:.0%}",
                *(f"{1000 * row[name]:.0f} ms" for name in ("p50", "p95", "p99", "health_p99")),
                f"{row['lost']} / {row['twice']} / {row['different']}",
            ]
            for row in found["clients"]
        ]  # fmt: skip
        head = ["clients", "requests/s", "of the job's", "p50", "p95", "p99", "health, p99", "lost / twice / different"]
        parts.append(
            f"Model `{results['model']}`, {found['texts']:,} texts, rounds: {found['rounds']}. "
            f"A job over the same texts: {found['job_per_second']:.1f} texts/s. "
            f"One text at a time, median: {1000 * found['direct_p50']:.1f} ms "
            f"by `Summarizer`, {1000 * found['served_p50']:.1f} ms from the server "
            f"({found['served_p50'] / found['direct_p50'] - 1:+.0%})."
        )
        parts.append(table(head, rows))
    if found := results.get("memory"):
        first, last = megabytes(found["first"]), megabytes(found["last"])
        parts.append(
            f"Memory of both processes after {found['requests'] // 20:,} requests: {first}; after "
            f"{found['requests']:,}: {last} ({found['growth']:+.1%})."
        )
    if found := results.get("faults"):
        parts.append(table(["fault", "what happened"], [[name, text] for name, text in found.items()]))
    return "\n\n".join(parts)


def failures(results: dict[str, Any]) -> list[str]:
    """Promises that were broken. Speed has none here: it depends on the machine."""
    rows = results.get("clients", {}).get("clients", [])
    wrong = [(row, name) for row in rows for name in ("lost", "twice", "different") if row[name]]
    broken = [f"{row['clients']} clients: {row[name]} {name}" for row, name in wrong]
    return broken + [f"{name}: {text}" for name, text in results.get("faults", {}).items() if text.startswith("FAILED")]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from bench.environment import describe
    from fairseq_el import Summarizer

    texts = read_texts(args)
    words = ["--threads", str(args.threads)] if args.threads else []
    preset = ["--preset", args.preset] if args.preset else []
    command = "scripts/load.py " + " ".join(sys.argv[1:])
    results: dict[str, Any] = {"environment": describe({}) | {"command": command.strip()}, "model": args.model}
    with Server("--model", args.model, *preset, *words, "--limit-timeout", "600") as server:
        if "clients" not in args.skip:
            lengths = {"max_len_a": 0, "max_len_b": args.max_len} if args.max_len else {}
            summarizer = Summarizer.load(args.model, args.preset, threads=args.threads, **lengths)
            server.options = {"max_len": args.max_len} if args.max_len else {}
            results["clients"] = measure_clients(server, summarizer, texts, args)
            print(json.dumps(results["clients"], indent=1), flush=True)
        if "memory" not in args.skip:
            results["memory"] = measure_memory(server, texts, args)
    if "faults" not in args.skip:
        results["faults"] = faults.all_faults(["--model", args.model, *preset, *words], texts)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="as for fairseq-el serve (default: demo)")
    add("--preset", help="as for fairseq-el serve (default: that of the model)")
    add("--source", type=Path, default=ROOT / "demo" / "test.source", help="texts, one per line")
    add("--texts", type=int, default=640, help="how many of them (default: 640)")
    add("--words", type=int, help="of each text, from as many lines as that takes (default: one line)")
    add("--max-len", type=int, help="tokens of a summary, for --skip memory faults (default: that of the preset)")
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="at a time (default: 1 4 16 64)")
    add("--singles", type=int, default=100, help="texts for the comparison of one at a time (default: 100)")
    add("--rounds", type=int, default=3, help="of server and Summarizer in turn (default: 3)")
    add("--requests", type=int, default=10_000, help="while memory is watched (default: 10,000)")
    add("--threads", type=int, help="of torch (default: all cores)")
    add("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out")
    add("--section", default="load", help="of the page that is replaced (default: load)")
    add("--page", type=Path, default=PAGE, help="where the figures go (default: docs/reliability.md)")
    args = parser.parse_args()
    results = measure(args)
    from bench.report import replace_section

    text = render(results)
    replace_section(args.page, args.section, text)
    print(text)
    if broken := failures(results):
        sys.exit(f"load: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
