"""The service as clients see it: the summaries of `Summarizer`, whatever other clients do."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fairseq_el.jobs.summarizer import Summarizer
from helpers import TEXTS, load_once, run_command
from serving.client import HOST, Client, Server

SUMMARIES, STREAM = "/v1/summaries", "/v1/summaries/stream"
SHORT = [text[:150] for text in TEXTS]


@pytest.fixture(scope="module")
def server():
    with Server("--model", "demo", "--threads", "1", "--limit-texts", "30") as running:
        yield running


def ask(server: Server, path: str, request: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, answer and headers."""
    data = None if request is None else json.dumps(request).encode()
    headers = {"Content-Type": "application/json", **headers} if data else headers
    wanted = urllib.request.Request(f"http://{HOST}:{server.port}{path}", data, headers)
    try:
        with urllib.request.urlopen(wanted, timeout=120) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def results(server: Server, **request: Any) -> list[dict[str, Any]]:
    status, body, _ = ask(server, SUMMARIES, request)
    assert status == 200, body
    return json.loads(body)["results"]


def events(server: Server, text: str) -> list[tuple[str, dict[str, Any]]]:
    _, body, headers = ask(server, STREAM, {"text": text})
    assert headers["Content-Type"].startswith("text/event-stream")
    parts = [part.splitlines() for part in body.decode().strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def assert_same(found: list[dict[str, Any]], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, right in zip(found, expected, strict=True):
        assert mine["summary"] == right.summary and mine["summary_tokens"] == len(right.tokens)
        assert mine["score"] == pytest.approx(right.score, abs=1e-4)
        assert [other["summary"] for other in mine["alternatives"]] == [o.summary for o in right.alternatives]


# ---- the same summaries


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"search": "diverse", "nbest": 4},
        {"search": "greedy"},
        {"beam": 2, "nbest": 2, "max_len": 9, "min_len": 4},
        {"attention": "always", "nbest": 3},
    ],
    ids=str,
)
def test_summaries_are_those_of_summarizer(server, options):
    names = {"max_len": "max_len_b", "min_len": "min_len", "beam": "beam", "attention": "el_attention"}
    changes = {names[name]: value for name, value in options.items() if name in names}
    summarizer = load_once("demo", "demo", options.get("search", "beam"), **changes)
    texts = ["", *SHORT[:12], "x" * 3000]
    expected = summarizer.detailed(texts, options.get("nbest", 1))
    assert_same(results(server, texts=texts, **options), expected)
    assert_same(results(server, text=texts[3], **options), [expected[3]])


def test_concurrent_clients_get_their_own_summaries_in_common_batches(server):
    expected = load_once("demo", "demo")(SHORT)
    before = [server.metric(f"fairseq_el_batch_texts_{kind}") for kind in ("count", "sum")]

    async def client(number: int) -> list[str]:
        async with Client(server.port) as connection:
            found = []
            for index in range(number, len(SHORT), 8):
                status, answer = await connection.post(SUMMARIES, {"text": SHORT[index]})
                assert status == 200
                found.append(answer["results"][0]["summary"])
            return found

    async def all_clients() -> list[list[str]]:
        return await asyncio.gather(*(client(number) for number in range(8)))

    assert asyncio.run(all_clients()) == [expected[number::8] for number in range(8)]
    batches, texts = (server.metric(f"fairseq_el_batch_texts_{k}") - b for k, b in zip(("count", "sum"), before))
    assert texts == len(SHORT) and batches < len(SHORT) / 2


def test_a_text_that_is_cut_or_unknown_or_blank_says_so(server):
    long, unknown, blank = results(server, texts=["many words " * 300, "日本語の長い文章です。" * 3, " \n "])
    assert long["truncated"] and long["source_tokens"] == 190 and not unknown["truncated"]
    assert unknown["mostly_unknown"] and not long["mostly_unknown"]
    assert blank["summary"] == "" and blank["score"] is None and blank["error"] is None


def test_the_form_of_attention_that_a_request_asks_for_is_used(server):
    el, multi_head = (results(server, text=TEXTS[0], attention=form)[0] for form in ("always", "never"))
    assert el["summary"] == multi_head["summary"]
    assert multi_head["source_state_bytes"] > 3 * el["source_state_bytes"] > 0


# ---- streaming


def test_a_stream_is_the_greedy_summary_token_by_token(server):
    expected = load_once("demo", "demo", "greedy").detailed(SHORT[:4])
    for text, right in zip(SHORT, expected, strict=False):
        *tokens, (last, found) = events(server, text)
        assert {name for name, _ in tokens} == {"token"} and last == "summary"
        assert "".join(record["text"] for _, record in tokens) == right.summary and len(tokens) > 2
        assert_same([found], [right])


def test_streams_share_batches(server):
    expected = load_once("demo", "demo", "greedy")(SHORT[:6])

    async def stream(text: str) -> str:
        async with Client(server.port) as client:
            client.send(STREAM, {"text": text})
            body = (await client.reader.readuntil(b"event: summary")).decode()
        return "".join(json.loads(line[6:])["text"] for line in body.splitlines() if line.startswith("data: "))

    async def all_streams() -> list[str]:
        return await asyncio.gather(*map(stream, SHORT[:6]))

    assert asyncio.run(all_streams()) == expected


# ---- operators


def test_operators_see_health_readiness_model_and_metrics(server):
    results(server, text=SHORT[0])
    assert ask(server, "/health")[0] == ask(server, "/ready")[0] == ask(server, "/docs")[0] == 200
    model = json.loads(ask(server, "/v1/model")[1])
    assert model["searches"]["beam"] == {"beam": 4, "min_len": 1, "max_len": 30} and model["precisions"] == ["auto"]
    for name in ("queue_texts", "queue_seconds_count", "summary_tokens_total", "tokens_per_second", "cache_bytes"):
        assert server.metric(f"fairseq_el_{name}") >= (0 if name == "queue_texts" else 0.1), name
    assert server.metric("fairseq_el_request_seconds_count") > 3


def test_pages_name_no_external_addresses(server):
    for path in ("/", "/docs"):
        page = ask(server, path)[1].decode()
        assert "http://" not in page and "https://" not in page and 'src="//' not in page


def test_the_front_does_without_torch(server):
    names = Path(f"/proc/{server.pid}/maps").read_text(), Path(f"/proc/{server.worker()}/maps").read_text()
    assert ["libtorch" in maps for maps in names] == [False, True]


# ---- faults


def test_a_client_that_leaves_frees_its_place(server):
    before = server.metric("fairseq_el_summary_tokens_total")

    async def leave() -> None:
        for _ in range(5):
            async with Client(server.port) as client:
                client.send(SUMMARIES, {"texts": SHORT[:20], "beam": 16})
                await client.writer.drain()
                await asyncio.sleep(0.02)

    asyncio.run(leave())
    assert results(server, text=SHORT[0])[0]["summary"] == load_once("demo", "demo")(SHORT[0])
    until = time.monotonic() + 10
    while server.metric("fairseq_el_queue_texts") and time.monotonic() < until:
        time.sleep(0.02)
    assert server.metric("fairseq_el_queue_texts") == 0
    assert server.metric("fairseq_el_summary_tokens_total") - before < 5 * 20 * 5  # the rest was not summarised


def test_a_client_that_leaves_before_the_answers_to_requests_sent_together_leaves_no_traceback(tmp_path):
    log = tmp_path / "log"

    async def leave(port: int) -> None:
        for _ in range(3):
            async with Client(port) as client:
                for text in SHORT[:4]:
                    client.send(SUMMARIES, {"text": text})
                await client.writer.drain()

    with log.open("w") as errors, Server("--model", "demo", "--threads", "1", errors=errors) as running:
        asyncio.run(leave(running.port))
        assert results(running, text=SHORT[0])[0]["summary"]
    assert log.read_text() == ""


def test_a_deadline_is_kept(server):
    began = time.monotonic()
    status, body, _ = ask(server, SUMMARIES, {"texts": TEXTS[:20], "beam": 16, "timeout": 0.05})
    assert status == 504 and time.monotonic() - began < 2
    assert "error" in json.loads(body)


def test_memory_that_runs_out_halves_batches_and_fails_texts_not_the_server(server):
    """Under a limit on the address space of the worker that does not hold the batch, and then none of its texts."""
    worker = server.worker()
    used = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.prlimit(worker, resource.RLIMIT_AS)
    resource.prlimit(worker, resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    try:
        large = {"texts": TEXTS[:24], "beam": 16, "max_len": 100, "attention": "never"}
        status, body, _ = ask(server, SUMMARIES, large)
    finally:
        if server.worker() == worker:
            resource.prlimit(worker, resource.RLIMIT_AS, before)
    assert status in (200, 503), body
    server.wait_until_ready()
    assert results(server, text=SHORT[0])[0]["summary"] == load_once("demo", "demo")(SHORT[0])


def test_a_worker_that_is_killed_loses_no_text(server):
    expected = load_once("demo", "demo")(SHORT[:3])

    async def kill() -> Any:
        async with Client(server.port) as client:
            client.send(SUMMARIES, {"texts": SHORT[:3]})
            await client.writer.drain()
            await asyncio.sleep(0.01)
            os.kill(server.worker(), signal.SIGKILL)
            status, body = await client.read()
            return status, json.loads(body)

    status, answer = asyncio.run(kill())
    assert status == 200 and [found["summary"] for found in answer["results"]] == expected


# ---- limits, token, the end


@pytest.fixture(scope="module")
def small_server(tmp_path_factory):
    """With small limits and a token."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("secret\n")
    words = ["--limit-queue", "3", "--limit-body-bytes", "2000", "--limit-texts", "9", "--token-file", str(token)]
    with Server("--model", "demo", "--threads", "1", *words) as running:
        yield running


def test_a_token_is_asked_for(small_server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        status, body, found = ask(small_server, SUMMARIES, {"text": "a"}, **headers)
        assert status == 401 and b"token" in body and found["WWW-Authenticate"] == "Bearer"
    assert ask(small_server, "/metrics")[0] == ask(small_server, "/v1/model")[0] == 401
    assert ask(small_server, "/health")[0] == ask(small_server, "/")[0] == 200
    assert ask(small_server, SUMMARIES, {"text": "a"}, Authorization="Bearer secret")[0] == 200


def test_a_full_queue_answers_429_with_retry_after(small_server):
    status, body, headers = ask(small_server, SUMMARIES, {"texts": ["a"] * 5}, Authorization="Bearer secret")
    assert status == 429 and int(headers["Retry-After"]) >= 1 and b"queue is full" in body


def test_a_large_request_is_refused_with_and_without_its_length(small_server):
    status, body, _ = ask(small_server, SUMMARIES, {"text": "x" * 3000}, Authorization="Bearer secret")
    assert status == 413 and b"at most 2,000 bytes" in body

    async def chunked() -> bytes:
        async with Client(small_server.port) as client:
            head = f"POST {SUMMARIES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.writer.write(head.encode() + b"fa0\r\n" + b"x" * 4000 + b"\r\n")
            return await client.reader.readline()

    assert b" 413 " in asyncio.run(chunked())


def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest():
    with Server("--model", "demo", "--threads", "1") as running:
        worker = running.worker()

        async def scenario() -> tuple[int, bytes]:
            async with Client(running.port) as client:
                client.send(SUMMARIES, {"texts": TEXTS[:20]})
                await client.writer.drain()
                await asyncio.sleep(0.1)
                running.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.5)
                with pytest.raises(OSError):
                    async with Client(running.port) as other:
                        other.send(SUMMARIES, {"text": "too late"})
                        assert (await other.read())[0] == 503
                        raise OSError
                return await client.read()

        status, body = asyncio.run(scenario())
        assert status == 200 and all(found["summary"] for found in json.loads(body)["results"])
        assert running.process.wait(30) == 0
        assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "there is no checkpoint nowhere"),
        (["--model", "demo", "--search", "sideways"], "the preset demo has no search 'sideways'"),
        (["--model", "demo", "--port", "99999"], "--port 99999 is out of range"),
        (["--model", "demo", "--precision", "auto,int9"], "'int9' does not exist"),
        (["--model", "demo", "--limit-queue", "0"], "--limit-queue 0 is out of range"),
        (["--model", "demo", "--token-file", "/dev/null"], "/dev/null has no token"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, message):
    port = [] if "--port" in words else ["--port", "0"]
    done = run_command(sys.executable, "-m", "fairseq_el", "serve", *port, *words)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("serve: error:")]) == 1


def test_a_port_in_use_is_one_line(server):
    done = run_command(sys.executable, "-m", "fairseq_el", "serve", "--model", "demo", "--port", server.port)
    assert done.returncode == 1 and "give another --port" in done.stderr and "Traceback" not in done.stderr


def test_several_precisions_are_served_from_one_process_and_ctrl_c_ends_it():
    with Server("--model", "demo", "--threads", "1", "--precision", "auto,int8") as running:
        expected = Summarizer.load("demo", precision="int8")(SHORT[:4])
        assert [found["summary"] for found in results(running, texts=SHORT[:4], precision="int8")] == expected
        exact = [found["summary"] for found in results(running, texts=SHORT[:4])]
        assert exact == load_once("demo", "demo")(SHORT[:4])
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0


def test_a_worker_does_not_outlive_a_front_that_was_killed():
    with Server("--model", "demo", "--threads", "1") as running:
        worker = running.worker()
        running.process.kill()
        running.process.wait()
        until = time.monotonic() + 10
        while is_alive(worker) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")
