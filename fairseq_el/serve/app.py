"""The application: routes, and errors as one sentence."""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi_offline import FastAPIOffline
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from fairseq_el.serve import metrics as prometheus
from fairseq_el.serve import schemas
from fairseq_el.serve.batches import QueueFull
from fairseq_el.serve.guard import Guard, followed_by
from fairseq_el.serve.messages import Result
from fairseq_el.serve.metrics import Metrics
from fairseq_el.serve.scheduler import Answer, NotReady, Scheduler
from fairseq_el.serve.settings import ServerSettings

SUMMARIES = "/v1/summaries"
PAGE = Path(__file__).with_name("page.html")
DESCRIPTION = "Summaries from fairseq checkpoints. Texts of concurrent requests are batched together."
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem, "description": text}
    for status, text in {
        400: "not JSON", 401: "the token is missing or wrong", 408: "the request arrived too slowly",
        413: "too large", 415: "not sent as JSON", 422: "a value is not valid", 429: "the queue is full",
        500: "the server failed", 503: "not ready, or out of memory", 504: "no answer within the deadline",
    }.items()
}  # fmt: skip
STATUS_OF_KIND = {"invalid": 422, "failed": 503, "internal": 500}
RETRY_WHEN_LOADED = {"Retry-After": "5"}


def build_app(settings: ServerSettings, scheduler: Scheduler, metrics: Metrics) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        scheduler.stop()

    app = FastAPIOffline(
        title="fairseq-el serve", version=settings.version, description=DESCRIPTION, lifespan=lifespan,
        redoc_url=None,
    )  # fmt: skip
    service = Service(settings, scheduler, metrics)
    app.add_middleware(Shortcut, service=service)
    app.add_middleware(Guard, limits=settings.limits, metrics=metrics, token=settings.token)  # around the shortcut
    add_error_handlers(app)
    add = app.add_api_route
    add(SUMMARIES, service.summaries, methods=["POST"], response_model=schemas.SummariesResponse,
        responses=PROBLEMS, summary="Summarize a text, or several")  # fmt: skip
    add("/v1/summaries/stream", service.stream, methods=["POST"], response_class=Response,
        responses=PROBLEMS | {200: {"content": {"text/event-stream": {}}, "description": STREAM_EVENTS}},
        summary="Summarize a text by greedy search, token by token")  # fmt: skip
    add("/v1/model", service.model, response_model=schemas.ModelDescription,
        responses={status: PROBLEMS[status] for status in (401, 503)}, summary="What the server runs")  # fmt: skip
    add_operations(app, scheduler, metrics)
    add_page(app)
    return app


STREAM_EVENTS = (
    'Server-sent events: `token` with `{"text": ...}`, what to append, and at the end `summary` with a result as of '
    '/v1/summaries, or `error` with `{"error": ...}`'
)


class Service:
    """What the routes under /v1 do."""

    def __init__(self, settings: ServerSettings, scheduler: Scheduler, metrics: Metrics):
        self.settings = settings
        self.limits = settings.limits
        self.scheduler = scheduler
        self.metrics = metrics

    async def summaries(self, request: schemas.SummariesRequest) -> Response:
        started = time.monotonic()
        facts = self.scheduler.check_open()
        texts = request.all_texts()
        if len(texts) > self.limits.texts:
            raise schemas.InvalidRequest(f"{len(texts):,} texts are too many: at most {self.limits.texts:,} at a time")
        search = schemas.search_of(request, self.settings.model.search, facts, self.limits)
        answers = self.scheduler.submit(texts, search, request.nbest)
        async with asyncio.timeout(self._timeout(request)), cancelled_at_exit(answers):
            found = await asyncio.gather(*answers)
        problem = next((answer.result for answer in found if answer.result.kind == "invalid"), None)
        if problem is None and all(answer.result.problem for answer in found):
            problem = found[0].result
        if problem is not None:
            return as_error(STATUS_OF_KIND[problem.kind], problem.problem)
        return as_json({"results": [self._record(answer) for answer in found], "seconds": time.monotonic() - started})

    async def stream(self, request: schemas.StreamRequest) -> Response:
        facts = self.scheduler.check_open()
        search = schemas.search_of(request, self.settings.model.search, facts, self.limits)
        tokens: asyncio.Queue[str | None] = asyncio.Queue()
        (answer,) = self.scheduler.submit([request.text], search, on_token=tokens.put_nowait)
        answer.add_done_callback(lambda _: tokens.put_nowait(None))
        until = asyncio.get_running_loop().time() + self._timeout(request)
        async with asyncio.timeout_at(until):
            try:
                first = await tokens.get()  # mistakes that only the worker sees should have a status
            except asyncio.CancelledError:
                answer.cancel()
                raise
        if first is None and not answer.cancelled() and answer.result().result.problem:
            result = answer.result().result
            return as_error(STATUS_OF_KIND[result.kind], result.problem)
        return StreamingResponse(
            self._events(first, tokens, answer, until), media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )  # fmt: skip

    async def _events(
        self, text: str | None, tokens: asyncio.Queue[str | None], answer: asyncio.Future[Answer], until: float
    ) -> AsyncIterator[str]:
        with cancelled_at_exit_of([answer]):
            try:
                async with asyncio.timeout_at(until):
                    while text is not None:
                        yield event("token", {"text": text})
                        text = await tokens.get()
                    found = await answer
            except TimeoutError:
                yield event("error", {"error": "there was no answer in time"})
                return
            problem = found.result.problem
            yield event("error", {"error": problem}) if problem else event("summary", self._record(found))

    async def model(self) -> Response:
        facts = self.scheduler.check_open()
        limits = asdict(self.limits)
        described = {"search": self.settings.model.search, "version": self.settings.version, "limits": limits}
        record = {name: value for name, value in asdict(facts).items() if name not in ("batch_size", "max_tokens")}
        return as_json(record | described)

    def _timeout(self, request: schemas.Options) -> float:
        return min(request.timeout or self.limits.timeout, self.limits.timeout)

    def _record(self, answer: Answer) -> dict[str, Any]:
        self.metrics.queue_seconds.observe(answer.queue_seconds)
        return record_of(answer.result) | {"queue_seconds": answer.queue_seconds}


class Shortcut:
    """Takes valid requests for summaries past FastAPI's routing, which needs as much of the cores as all else that the
    front does for a request, and the model needs them too. Requests with mistakes go the usual way, to be explained."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == SUMMARIES:
            message = await receive()  # the whole body: `Guard` has read it
            try:
                request = schemas.SummariesRequest.model_validate_json(message["body"])
                response = await self.service.summaries(request)
                return await response(scope, receive, send)
            except (ValidationError, schemas.InvalidRequest, QueueFull, NotReady):  # nothing was submitted
                receive = followed_by(message, receive)
        await self.app(scope, receive, send)


def record_of(result: Result) -> dict[str, Any]:
    if not result.problem:
        return {**result.fields, "error": None}
    return schemas.EMPTY_RESULT | result.fields | {"summary": None, "score": None, "error": result.problem}


@contextlib.contextmanager
def cancelled_at_exit_of(answers: list[asyncio.Future[Answer]]) -> Any:
    """Takes what is left of a request out of the queue when its client is gone or its time is up."""
    try:
        yield
    finally:
        for answer in answers:
            answer.cancel()


@contextlib.asynccontextmanager
async def cancelled_at_exit(answers: list[asyncio.Future[Answer]]) -> AsyncIterator[None]:
    with cancelled_at_exit_of(answers):
        yield


def add_operations(app: FastAPI, scheduler: Scheduler, metrics: Metrics) -> None:
    """What operators and their tools ask for."""

    async def health() -> Response:
        return as_json({"status": "ok"})

    async def ready() -> Response:
        is_ready = scheduler.is_ready and not scheduler.is_refusing
        return as_json({"ready": is_ready}, 200 if is_ready else 503)

    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=prometheus.CONTENT_TYPE)

    app.add_api_route("/health", health, summary="Whether the server answers")
    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": "not yet, or not any more"}}
    app.add_api_route("/ready", ready, responses=not_ready, summary="Whether the model is loaded")
    described: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}, 401: PROBLEMS[401]}
    app.add_api_route("/metrics", show_metrics, response_class=Response, responses=described, summary="For Prometheus")


def add_page(app: FastAPI) -> None:
    html = PAGE.read_text(encoding="utf-8")
    allowed = {kind: hashes_of(html, kind) for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def page() -> Response:
        return HTMLResponse(html, headers=headers)

    app.add_api_route("/", page, include_in_schema=False)


def hashes_of(html: str, kind: str) -> str:
    """Of the page's own scripts or styles: the browser runs no others."""
    parts = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def add_error_handlers(app: FastAPI) -> None:
    def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = list(error.errors())
        if errors[0]["type"] == "json_invalid":
            return as_error(400, "the request is not valid JSON")
        return as_error(422, schemas.first_mistake(errors))

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {
            400: "the request is not valid JSON",
            404: "there is nothing at this address: see /docs",
            405: f"this address does not take {request.method}: see /docs",
        }
        message = known.get(error.status_code, str(error.detail))
        return as_error(error.status_code, message, dict(error.headers or {}))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(schemas.InvalidRequest, lambda _, error: as_error(422, str(error)))
    app.add_exception_handler(QueueFull, queue_full)
    app.add_exception_handler(NotReady, lambda _, error: as_error(503, str(error), RETRY_WHEN_LOADED))
    app.add_exception_handler(TimeoutError, lambda *_: as_error(504, "there was no answer in time: try again later"))
    app.add_exception_handler(Exception, lambda *_: as_error(500, "the server failed; its log says why"))


def queue_full(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFull)
    return as_error(429, str(error), {"Retry-After": str(error.retry_after)})


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def as_json(record: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(record, status)


def as_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    message = " ".join(message.encode("utf-8", "replace").decode().split())
    return JSONResponse({"error": message}, status, headers)
