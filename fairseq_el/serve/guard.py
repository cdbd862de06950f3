"""Around the application: what holds for every request, before anything looks into it."""

import asyncio
import hmac
import json
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairseq_el.serve.metrics import Metrics
from fairseq_el.serve.settings import Limits

NEEDS_TOKEN = ("/v1/", "/metrics")
KNOWN_PATHS = ("/", "/v1/summaries", "/v1/summaries/stream", "/v1/model", "/health", "/ready", "/metrics")
GRACE = 5.0  # seconds beyond a request's deadline, for its own answer to that


class Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Disconnected(Exception):
    """The client has gone."""


class Guard:
    """Limits the size and time of requests, asks for the token, and cancels the work for clients that have gone."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None):
        self.app = app
        self.limits = limits
        self.metrics = metrics
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.monotonic(), 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, watched_send)
        except Refused as error:
            await refuse(watched_send, error.status, str(error))
        except TimeoutError:  # of a client that does not take its answer, or a bug
            if not status:
                await refuse(watched_send, 504, "there was no answer in time")
        except Disconnected:
            status = status or 499  # as nginx calls it; nobody sees it but the metrics
        path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
        self.metrics.request_seconds.labels(path, str(status)).observe(time.monotonic() - started)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_headers(scope)
        body = await self._read(receive)
        async with asyncio.timeout(self.limits.timeout + GRACE):
            await self._run(scope, body, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self.token is not None and scope["path"].startswith(NEEDS_TOKEN):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.token.encode()):
                raise Refused(401, "this server asks for a token: send the header Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.limits.body_bytes:
            raise self._too_large()
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            # also what keeps pages of other sites out: a browser asks before it sends JSON elsewhere
            raise Refused(415, "send JSON, with the header Content-Type: application/json")

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is too large: at most {self.limits.body_bytes:,} bytes")

    async def _read(self, receive: Receive) -> bytes:
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {self.limits.body_seconds:g} s") from None

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Runs the application, until it has answered or the client is gone."""
        gone = asyncio.ensure_future(wait_for_disconnect(receive))

        async def disconnected() -> Message:
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        whole = {"type": "http.request", "body": body, "more_body": False}
        work = asyncio.ensure_future(self.app(scope, followed_by(whole, disconnected), send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Disconnected
            work.result()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))


def followed_by(first: Message, receive: Receive) -> Receive:
    """Receives this message, and then the others."""
    waiting = [first]

    async def receive_first() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_first


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
