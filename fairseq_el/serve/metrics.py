"""What Prometheus can ask for."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RATE_SECONDS = 10.0  # over which tokens per second are averaged


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names: Any = {"namespace": "fairseq_el", "registry": self.registry}
        self.queue_texts = Gauge("queue_texts", "texts that wait for a batch", **names)
        self.batch_texts = Histogram("batch_texts", "texts in a batch", buckets=TEXTS, **names)
        self.request_seconds = Histogram(
            "request_seconds", "from a request to the end of its answer", ["path", "status"], buckets=SECONDS, **names
        )
        self.queue_seconds = Histogram("queue_seconds", "a text's wait for its batch", buckets=SECONDS, **names)
        self.source_tokens = Counter("source_tokens", "tokens of summarized texts", **names)
        self.summary_tokens = Counter("summary_tokens", "tokens of summaries", **names)
        self.tokens_per_second = Gauge("tokens_per_second", "of summaries, over the last 10 s", **names)
        self.tokens_per_second.set_function(self._tokens_per_second)
        self.cache_bytes = Gauge("cache_bytes", "state of the last batch at its peak", ["kind"], **names)
        self.worker_restarts = Counter("worker_restarts", "workers that died and were started again", **names)
        self.recent: list[tuple[float, int]] = []  # time and summary tokens

    def count_result(self, fields: dict[str, Any]) -> None:
        self.source_tokens.inc(fields["source_tokens"])
        self.summary_tokens.inc(fields["summary_tokens"])
        self.cache_bytes.labels("source").set(fields["source_state_bytes"])
        self.cache_bytes.labels("beams").set(fields["beam_state_bytes"])
        self.recent.append((time.monotonic(), fields["summary_tokens"]))
        if len(self.recent) > 10_000:
            self._forget_old()

    def _forget_old(self) -> None:
        since = time.monotonic() - RATE_SECONDS
        self.recent = [entry for entry in self.recent if entry[0] >= since]

    def _tokens_per_second(self) -> float:
        self._forget_old()
        return sum(tokens for _, tokens in self.recent) / RATE_SECONDS

    def text(self) -> bytes:
        return generate_latest(self.registry)
