"""What the command line decides about a server."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSettings:
    """What the worker loads."""

    model: str
    bpe_dir: str | None = None
    preset: str | None = None
    search: str = "beam"  # of requests that name none
    precisions: tuple[str, ...] = ("auto",)  # the first is that of requests that name none
    cpu: bool = False
    seed: int = 1
    threads: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the preset that hold for all requests, such as `max_tokens`."""


@dataclass(frozen=True)
class Limits:
    """What clients may ask for. Texts longer than the model reads are cut, which results say."""

    queue: int = 512  # texts that wait, of all clients
    texts: int = 64  # of a request
    body_bytes: int = 1_000_000  # of a request
    beam: int = 16
    max_len: int = 1024  # tokens of a summary that a request may ask for
    timeout: float = 60.0  # seconds from the request to its answer
    body_seconds: float = 10.0  # that a request may take to arrive
    connections: int = 1024
    batch_wait: float = 0.004  # seconds that a text waits for others while several clients are active


@dataclass(frozen=True)
class ServerSettings:
    host: str
    port: int
    model: ModelSettings
    limits: Limits
    token: str | None = None  # that clients have to send
    version: str = ""
