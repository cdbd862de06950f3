"""A lean HTTP client, so that it takes little of the machine that the server runs on too, and a server to ask."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO, Any, Self

LOAD_SECONDS = 300
HOST = "127.0.0.1"


class Client:
    """One connection, kept open."""

    def __init__(self, port: int):
        self.port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(HOST, self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        return await self.read()

    async def post(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        self.send(path, request)
        status, body = await self.read()
        return status, json.loads(body)

    def send(self, path: str, request: dict[str, Any]) -> None:
        body = json.dumps(request).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def read(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
        return int(head.split(maxsplit=2)[1]), await self.reader.readexactly(int(length[1])) if length else b""


class Server:
    """`fairseq-el serve` with these words, on a free port, until the end of the block."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None, errors: IO[str] | None = None):
        self.words = words
        self.environment = environment or {}
        self.errors = errors  # where its log goes
        self.options: dict[str, Any] = {}  # of requests, for clients that ask for the same

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "fairseq_el", "serve", "--port", "0", *self.words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=os.environ | self.environment
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not (found := re.search(r":(\d+) ", line)):
            raise RuntimeError(f"the server did not start: {line!r}, status {self.process.wait()}")
        self.port = int(found[1])
        self.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if self.process.stdout:
                self.process.stdout.close()

    def wait_until_ready(self) -> None:
        until = time.monotonic() + LOAD_SECONDS
        while not self.is_ready():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError("the server did not load its model")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://{HOST}:{self.port}/ready", timeout=10).status == 200
        except OSError:
            return False

    def worker(self) -> int:
        """The process with the model."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[-1])

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=10).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def percentile(values: list[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]
