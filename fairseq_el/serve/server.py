"""Runs the application with uvicorn: address, signals, and how it ends."""

import asyncio
import errno
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairseq_el.errors import UserError
from fairseq_el.serve.app import build_app
from fairseq_el.serve.metrics import Metrics
from fairseq_el.serve.scheduler import Scheduler
from fairseq_el.serve.settings import ServerSettings

logger = logging.getLogger(__name__)


class QuietTransport:
    """Ignores what is asked of a closed connection, as asyncio's transports do. uvloop's raise, for example where a
    client leaves before it has the answers to several requests that it sent together."""

    def __init__(self, transport: asyncio.Transport):
        self.transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


class Protocol(HttpToolsProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(QuietTransport(transport))  # type: ignore[arg-type]


class Server(uvicorn.Server):
    """Finishes accepted requests at SIGTERM and SIGINT, and refuses new ones from then on."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler):
        super().__init__(config)
        self.scheduler = scheduler
        self.failure: str | None = None
        scheduler.on_failure = self._fail

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.scheduler.refuse_new()
        super().handle_exit(sig, frame)

    def _fail(self, message: str) -> None:
        self.failure = message
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        return listening
    except socket.gaierror:
        raise UserError(f"there is no host {host!r}: give an address of this machine with --host") from None
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        advice = "give another --port, or 0 for any that is free" if used else "give another --host or --port"
        raise UserError(f"can't listen on {host}:{port} ({error.strerror}): {advice}") from error


def run(settings: ServerSettings) -> None:
    """Serves until a signal ends it."""
    listening = bind(settings.host, settings.port)
    metrics = Metrics()
    scheduler = Scheduler(settings.model, settings.limits, metrics)
    config = uvicorn.Config(
        build_app(settings, scheduler, metrics), log_level="warning", access_log=False, server_header=False,
        http=Protocol, limit_concurrency=settings.limits.connections, timeout_keep_alive=30,
        proxy_headers=False, timeout_graceful_shutdown=int(settings.limits.timeout) + 10, lifespan="on",
    )  # fmt: skip
    server = Server(config, scheduler)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"serve: http://{host}:{listening.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    previous = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    for name in previous:  # uvicorn raises the signal again when it has ended, which should not look like a failure
        signal.signal(name, lambda *_: None)
    try:
        server.run(sockets=[listening])
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
        listening.close()
    if server.failure:
        raise UserError(server.failure)
