"""The experiment `scaling` as numbers and words: what was measured, and what follows from it for large jobs.

Everything on paper is computed here by formula from the measured numbers; assumptions are named constants.
"""

import math
from statistics import median
from typing import Any

from bench.report import gigabytes, run_facts, table

JOBS = (10**6, 10**8, 10**9)  # articles
HOURS = 24.0  # in which a job is to be done, where cores are asked for
FLEETS = (64, 1024, 16384)  # cores, where hours are asked for
NETWORK = 1.25e8  # bytes/s: a gigabit a second, into and out of the driver's machine


# ---- what was measured


def figures(settings: Any, records: list[dict[str, Any]]) -> dict[str, Any]:
    teams = [team_row(records, *team) for team in settings.teams]
    return {
        "teams": teams,
        "driver": driver_row(records),
        "planner": planner_row(records),
        "ray": ray_row(records),
        "commands": command_rows(records),
    }


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def team_row(records: list[dict], workers: int, threads: int) -> dict[str, Any]:
    rounds = [r for r in of_kind(records, "team") if (r["workers"], r["threads"]) == (workers, threads)]
    rates = sorted(r["sentences"] / r["seconds"] for r in rounds)
    peaks = [max(*r["peak_bytes"], *r["loading_bytes"]) for r in rounds]
    return {
        "workers": workers,
        "threads": threads,
        "rate": {"median": median(rates), "least": rates[0], "most": rates[-1]},
        "rate_per_core": median(rates) / (workers * threads),
        "bytes_per_worker": max(peaks),
    }


def driver_row(records: list[dict]) -> dict[str, float]:
    rounds = of_kind(records, "driver")
    articles = rounds[0]["articles"]
    return {
        "check_rate": articles / median(r["check_seconds"] for r in rounds),
        "run_rate": articles / median(r["run_seconds"] for r in rounds),
        "rate": articles / median(r["check_seconds"] + r["run_seconds"] for r in rounds),
        "input_bytes": rounds[0]["input_bytes"] / articles,
        "output_bytes": rounds[0]["output_bytes"] / articles,
    }


def planner_row(records: list[dict]) -> dict[str, float]:
    rounds = of_kind(records, "planner")
    return {
        "rate": rounds[0]["articles"] / median(r["seconds"] for r in rounds),
        "row_bytes": rounds[0]["row_bytes"] / rounds[0]["articles"],
    }


def ray_row(records: list[dict]) -> dict[str, float]:
    (run,) = of_kind(records, "ray")
    return {"batches": run["batches"], "rate": (run["batches"] - 1) / run["seconds"]}


def command_rows(records: list[dict]) -> list[dict[str, Any]]:
    """Between the long run and the short one there is no start-up."""
    rows = []
    runs = of_kind(records, "command")
    for engine, workers, threads in dict.fromkeys((r["engine"], r["workers"], r["threads"]) for r in runs):
        own = [r for r in runs if (r["engine"], r["workers"], r["threads"]) == (engine, workers, threads)]
        seconds = {n: median(r["seconds"] for r in own if r["texts"] == n) for n in {r["texts"] for r in own}}
        few, many = sorted(seconds)
        per_text = (seconds[many] - seconds[few]) / (many - few)
        rows.append(
            {
                "engine": engine,
                "workers": workers,
                "threads": threads,
                "rate": 1 / per_text if per_text > 0 else None,
                "start": seconds[few] - few * per_text,
                "seconds": {str(n): seconds[n] for n in (few, many)},
            }
        )
    return rows


# ---- on paper


def best_team(made: dict[str, Any]) -> dict[str, Any]:
    return max(made["teams"], key=lambda team: team["rate_per_core"])


def limits(settings: dict[str, Any], made: dict[str, Any]) -> dict[str, float]:
    """The rate, in articles a second, that each part of one driver's machine allows."""
    moved = made["planner"]["row_bytes"] + made["driver"]["output_bytes"]
    return {
        "the planner, which reads texts and forms batches": made["planner"]["rate"],
        "the driver, which checks the input, keeps the journal and writes the output": made["driver"]["rate"],
        "Ray's passing on of batches": made["ray"]["rate"] * settings["batch"],
        f"a network of {NETWORK * 8 / 1e9:g} Gbit/s": NETWORK / moved,
    }


def job_row(settings: dict[str, Any], made: dict[str, Any], articles: int) -> dict[str, float]:
    team = best_team(made)
    core_hours = articles / team["rate_per_core"] / 3600
    cores = math.ceil(core_hours / HOURS)
    workers = math.ceil(cores / team["threads"])
    narrowest = min(limits(settings, made).values())
    return {
        "articles": articles,
        "core_hours": core_hours,
        "cores": cores,
        "workers": workers,
        "memory_bytes": workers * team["bytes_per_worker"],
        "drivers": math.ceil(cores * team["rate_per_core"] / narrowest),
        "input_bytes": articles * made["driver"]["input_bytes"],
        "output_bytes": articles * made["driver"]["output_bytes"],
        "journal_records": math.ceil(articles / settings["batch"]),
    }


# ---- words


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    size = f"{settings['tokens_in']:g} tokens in, {settings['tokens_out']:g} out, beam {settings['beam']}"
    return "\n\n".join(
        [
            "## Measured",
            run_facts(results),
            *quick_sentence(results),
            "### Workers\n\n"
            f"Shapes of `{settings['checkpoint']['arch']}`, random weights, {size}, batches of {settings['batch']}; "
            "all workers of a team at once. Memory is the most that a worker held, loading included.",
            teams_table(made["teams"]),
            teams_sentence(made["teams"]),
            "### What one process does for all workers\n\nArticles of that size in JSON lines, in the demo's encoding.",
            rates_table(settings, made),
            "### The whole command\n\n"
            "`fairseq-el summarize --model demo --preset demo` on the demo's texts; start-up is what does not grow "
            "with their number.",
            commands_table(made["commands"]),
            "## On paper\n\n" + on_paper(settings, made),
        ]
    )


def quick_sentence(results: dict[str, Any]) -> list[str]:
    words = "**Toy shapes (`--quick`): this shows that the benchmark runs, and nothing else.**"
    return [words] if results["quick"] else []


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def team_name(team: dict) -> str:
    return f"{several(team['workers'], 'worker')} with {several(team['threads'], 'thread')}"


def amount(value: float) -> str:
    return f"{value / 1e12:,.2f} TB" if value >= 1e12 else gigabytes(int(value))


def teams_table(rows: list[dict]) -> str:
    header = ["workers", "threads each", "sentences/s", "sentences/s per core", "memory per worker"]
    cells = []
    for row in rows:
        rate = row["rate"]
        cells.append(
            [
                str(row["workers"]),
                str(row["threads"]),
                f"{rate['median']:.4g} ({rate['least']:.4g} to {rate['most']:.4g})",
                f"{row['rate_per_core']:.4g}",
                gigabytes(row["bytes_per_worker"]),
            ]
        )
    return table(header, cells)


def teams_sentence(rows: list[dict]) -> str:
    by_cores: dict[int, list[dict]] = {}
    for row in rows:
        by_cores.setdefault(row["workers"] * row["threads"], []).append(row)
    said = []
    for cores, teams in by_cores.items():
        if len(teams) < 2:
            continue
        teams = sorted(teams, key=lambda row: row["workers"])
        one, many = teams[0], teams[-1]
        ratio = many["rate"]["median"] / one["rate"]["median"]
        memory = many["workers"] * many["bytes_per_worker"] / (one["workers"] * one["bytes_per_worker"])
        said.append(
            f"On {cores} cores, {team_name(many)} each do {ratio:.2f} times the work of {team_name(one)}, in "
            f"{memory:.2f} times the memory."
        )
    return " ".join(said)


def rates_table(settings: dict, made: dict) -> str:
    driver, planner, ray = made["driver"], made["planner"], made["ray"]
    rows = [
        ["driver: reading and checking the input", driver["check_rate"]],
        ["driver: journal (on the disk batch by batch), order and output", driver["run_rate"]],
        ["planner: pieces and batches", planner["rate"]],
        [f"Ray: batches passed to workers and back ({ray['rate']:.4g} a second)", ray["rate"] * settings["batch"]],
    ]
    sizes = (
        f"\n\nAn article is {driver['input_bytes']:,.0f} bytes in the input, {planner['row_bytes']:,.0f} on its way to "
        f"a worker, and {driver['output_bytes']:,.0f} in the output, which repeats the article."
    )
    return table(["", "articles/s"], [[name, number(rate)] for name, rate in rows]) + sizes


def commands_table(rows: list[dict]) -> str:
    cells = [
        [
            f"`--engine {row['engine']}`, {team_name(row)}",
            "not measurable" if row["rate"] is None else f"{row['rate']:.1f}",
            f"{row['start']:.1f} s",
        ]
        for row in rows
    ]
    return table(["", "sentences/s", "start-up"], cells)


def on_paper(settings: dict, made: dict) -> str:
    team = best_team(made)
    basis = (
        f"From the team with the most sentences a second per core above ({team_name(team)} each: "
        f"{team['rate_per_core']:.4g} per core, {gigabytes(team['bytes_per_worker'])} a worker), and as "
        "if cores were all like these and did not slow each other down: core-hours = articles / rate per core / 3600."
    )
    rows = [job_row(settings, made, articles) for articles in JOBS]
    return "\n\n".join(
        [
            basis,
            f"### Done in {HOURS:g} hours",
            jobs_table(rows),
            "### Hours",
            hours_table(rows),
            "### What becomes the bottleneck first",
            bottleneck(settings, made, team),
        ]
    )


def jobs_table(rows: list[dict]) -> str:
    header = ["articles", "core-hours", "cores", "memory for these", "input", "output",
              "journal records", "drivers (`--shard`)"]  # fmt: skip
    cells = [
        [f"{row['articles']:,}", number(row["core_hours"]), number(row["cores"]), amount(row["memory_bytes"]),
         amount(row["input_bytes"]), amount(row["output_bytes"]), f"{row['journal_records']:,}", f"{row['drivers']:,}"]
        for row in rows
    ]  # fmt: skip
    return table(header, cells)


def hours_table(rows: list[dict]) -> str:
    header = ["articles", *(f"hours on {cores:,} cores" for cores in FLEETS)]
    return table(header, [[f"{r['articles']:,}", *(number(r["core_hours"] / c) for c in FLEETS)] for r in rows])


def bottleneck(settings: dict, made: dict, team: dict) -> str:
    rate = team["rate_per_core"]
    saturated = sorted((allowed / rate, name) for name, allowed in limits(settings, made).items())
    cells = [[name, number(cores * rate), number(cores)] for cores, name in saturated]
    first_cores, first = saturated[0]
    return "\n\n".join(
        [
            "What one driver can keep busy, by what would hold it up:",
            table(["", "articles/s", "cores busy"], cells),
            f"Up to {number(first_cores)} cores the model is the bottleneck: an article takes {1 / rate:.3g} seconds "
            f"of a core, and {1e3 / first_cores / rate:.3g} milliseconds of {first}. Beyond, that is what holds a job "
            "up first, because there is one of it. Then the job is divided among drivers: `--shard k/n`, each with its "
            "own journal, planner and cluster or part of one, and `fairseq-el merge` at the end.",
            "Memory is a matter of each machine, not of the job: a machine needs "
            f"{gigabytes(team['bytes_per_worker'])} for every {several(team['threads'], 'core')}. With less, fewer "
            "workers get more threads each; the first table shows what that costs. Ray's object store holds batches on "
            f"their way, two for each worker: {2 * settings['batch'] * made['planner']['row_bytes'] / 1e6:.3g} MB.",
        ]
    )
