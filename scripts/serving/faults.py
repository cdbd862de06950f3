"""Faults that clients, the network and the machine bring about, while a client that behaves asks for summaries.

Each returns what happened in a few words, which begin with FAILED where the server broke a promise: the other client
gets the right summaries of all its texts, no fault is answered with a 5xx that is not announced, and the queue is empty
in the end.
"""

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serving.client import HOST, Client, Server, resident_bytes

BODY_BYTES = 20_000_000
MARGIN = 80 << 20  # of address space that a worker keeps: for some of the long texts; glibc reserves 64 MB at a time
LONG_TEXTS = 40


async def summarize(server: Server, texts: list[str]) -> list[str]:
    """The client that behaves."""
    found = []
    async with Client(server.port) as client:
        for text in texts:
            status, answer = await client.post("/v1/summaries", {"text": text})
            found.append(answer["results"][0]["summary"] if status == 200 else f"{status} {answer}")
    return found


async def killed_clients(server: Server, texts: list[str]) -> str:
    """Clients that send texts and close the connection before the answer."""
    for _ in range(10):
        for text in texts[:8]:
            client = Client(server.port)
            async with client:
                client.send("/v1/summaries", {"text": text})
                await client.writer.drain()
        await asyncio.sleep(0.05)
    return "80 requests abandoned"


async def killed_streams(server: Server, texts: list[str]) -> str:
    for text in texts[:20]:
        client = Client(server.port)
        async with client:
            client.send("/v1/summaries/stream", {"text": text})
            await client.reader.readuntil(b"data:")
    return "20 streams abandoned after their first token"


async def oversized_bodies(server: Server, texts: list[str]) -> str:
    statuses = set()
    for declared in (True, False):
        for _ in range(5):
            statuses.add(await asyncio.to_thread(send_oversized, server, declared))
    return f"10 bodies of 20 MB answered with {', '.join(sorted(statuses))}"


def send_oversized(server: Server, declared: bool) -> str:
    """declared: with its length, else in chunks."""
    with socket.create_connection((HOST, server.port), timeout=30) as connection:
        length = f"Content-Length: {BODY_BYTES}" if declared else "Transfer-Encoding: chunked"
        head = f"POST /v1/summaries HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        try:
            connection.sendall(head.encode())
            for _ in range(BODY_BYTES // 100_000):
                connection.sendall(b"x" * 100_000 if declared else b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        except OSError:
            pass  # answered and closed before the end, as it should be
        try:
            return connection.recv(12).decode()[-3:] or "a closed connection"
        except OSError:
            return "a closed connection"


async def slow_readers(server: Server, texts: list[str]) -> str:
    """Clients that ask for much and read nothing, and clients that send a byte now and then."""
    readers = []
    for _ in range(8):
        connection = socket.create_connection((HOST, server.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"text": "a slow reader"}'
        head = b"POST /v1/summaries HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        for _ in range(20):
            connection.sendall(head % len(body) + body)
        readers.append(connection)
        writer = socket.create_connection((HOST, server.port))
        writer.sendall(head % 1000 + b"{")
        readers.append(writer)
    await asyncio.sleep(1)
    for connection in readers:
        connection.close()
    return "8 clients that did not read 160 answers, 8 that did not finish their requests"


async def out_of_memory(server: Server, texts: list[str]) -> str:
    """The worker's address space is limited to little more than it has, in the middle of the work."""
    worker = server.worker()
    used = int(open(f"/proc/{worker}/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.prlimit(worker, resource.RLIMIT_AS)
    resource.prlimit(worker, resource.RLIMIT_AS, (used + MARGIN, before[1]))
    try:
        async with Client(server.port) as client:
            request = {"texts": [" ".join(texts)[:2000]] * LONG_TEXTS, "beam": 16, "max_len": 100}
            status, answer = await client.post("/v1/summaries", request)
    finally:
        if server.worker() == worker:
            resource.prlimit(worker, resource.RLIMIT_AS, before)
    survived = "survived" if server.worker() == worker else "was started again"
    done = sum(not result["error"] for result in answer["results"]) if status == 200 else 0
    return f"{LONG_TEXTS} long texts with beam 16: status {status}, {done} summarized; the worker {survived}"


async def killed_worker(server: Server, texts: list[str]) -> str:
    """SIGKILL, as the system's memory killer does it, with requests in work and in the queue."""
    old = server.worker()
    waiting = [asyncio.ensure_future(summarize(server, texts[:4])) for _ in range(8)]
    await asyncio.sleep(0.1)
    os.kill(old, signal.SIGKILL)
    began = time.monotonic()
    found = await asyncio.gather(*waiting)
    same = all(answers == found[0] for answers in found) and not any(text[:3].isdigit() for text in found[0])
    verdict = "all answered" if same else f"FAILED: answers differ: {found}"
    return f"8 clients with 4 texts each: {verdict}, after {time.monotonic() - began:.1f} s with loading"


FAULTS: dict[str, Callable[[Server, list[str]], Awaitable[str]]] = {
    "clients that close their connections": killed_clients,
    "streams that are closed": killed_streams,
    "oversized bodies": oversized_bodies,
    "slow clients": slow_readers,
    "no memory in the middle": out_of_memory,
    "worker killed": killed_worker,
}


def all_faults(words: list[str], texts: list[str]) -> dict[str, str]:
    """One after the other on one server, each beside a client whose answers are compared."""
    found: dict[str, str] = {}
    with Server(*words) as server:
        mine = texts[:20]
        expected = asyncio.run(summarize(server, mine))
        for name, fault in FAULTS.items():
            found[name] = asyncio.run(beside(fault, server, texts, expected))
            print(f"  {name}: {found[name]}", flush=True)
        memory = resident_bytes(server.pid) / 1e6
        print(f"  memory of the front at the end: {memory:.1f} MB", flush=True)
    return found


async def beside(
    fault: Callable[[Server, list[str]], Awaitable[str]], server: Server, texts: list[str], expected: list[str]
) -> str:
    other: Any = asyncio.ensure_future(summarize(server, texts[: len(expected)]))
    text = await fault(server, texts)
    answers = await other
    wrong = sum(mine != right for mine, right in zip(answers, expected, strict=True))
    until = time.monotonic() + 10
    while server.metric("fairseq_el_queue_texts") and time.monotonic() < until:
        await asyncio.sleep(0.1)
    left = server.metric("fairseq_el_queue_texts")
    if wrong or left:
        return f"FAILED: {wrong} answers of the other client are wrong, {left:.0f} texts are left in the queue; {text}"
    return f"{text}; the other client got all its {len(expected)} summaries"
