"""Requests, their batches and what becomes of them, with a worker that this test plays."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fairseq_el.serve import scheduler as module
from fairseq_el.serve.batches import QueueFull
from fairseq_el.serve.messages import Batch, Cancel, Facts, PartDone, Ready, Result, Search, SearchFacts, Token
from fairseq_el.serve.metrics import Metrics
from fairseq_el.serve.scheduler import Scheduler
from fairseq_el.serve.settings import Limits, ModelSettings

BEAM = Search("beam", "auto")
FACTS = Facts(
    "model", "preset", {"beam": SearchFacts(4, 1, 30)}, ("auto",), "auto", longest_text=100, batch_size=4,
    max_tokens=None, streams=True, threads=1, load_seconds=0.0,
)  # fmt: skip


class PlayedWorker:
    """Keeps what it is sent; the test answers for it."""

    def __init__(self, on_message: Callable[[Any], None], on_exit: Callable[[int], None]):
        self.on_message, self.on_exit = on_message, on_exit
        self.sent: list[Any] = []

    def start(self, settings: ModelSettings) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def stop(self) -> None:
        pass

    def texts(self) -> list[str]:
        """Of the newest batch."""
        return sorted(text.text for text in next(m for m in reversed(self.sent) if isinstance(m, Batch)).texts)

    def finish(self, is_last: bool = True) -> None:
        batch = next(m for m in reversed(self.sent) if isinstance(m, Batch))
        self.on_message(PartDone([Result(text.job, fields(f"of {text.text}")) for text in batch.texts], is_last))


def fields(summary: str) -> dict[str, Any]:
    counts = {"source_tokens": 5, "summary_tokens": 2, "source_state_bytes": 1, "beam_state_bytes": 1}
    return {"summary": summary, "truncated": False, **counts}


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(module, "WorkerProcess", PlayedWorker)

    def build(is_loaded: bool = True, **limits: Any) -> Scheduler:
        made = Scheduler(ModelSettings("model"), Limits(**{"batch_wait": 0.0, **limits}), Metrics())
        made.start()
        if is_loaded:
            made.worker.on_message(Ready(FACTS))
        return made

    return build


def played(scenario):
    """A test that is a coroutine."""

    def test(start):
        asyncio.run(asyncio.wait_for(scenario(start), 10))

    test.__doc__ = scenario.__doc__
    return test


def summaries(futures) -> list[str]:
    return [future.result().result.fields["summary"] for future in futures]


@played
async def test_what_arrives_while_a_batch_is_in_work_forms_the_next(start):
    served = start()
    futures = [future for text in "abcdefg" for future in served.submit([text], BEAM)]
    assert served.worker.texts() == ["a"]
    served.worker.finish()
    assert served.worker.texts() == ["b", "c", "d", "e"]
    served.worker.finish()
    served.worker.finish()
    assert summaries(futures) == [f"of {text}" for text in "abcdefg"]


@played
async def test_the_next_batch_begins_before_clients_get_the_results_of_the_last(start):
    served = start()
    (first,) = served.submit(["a"], BEAM)
    served.submit(["b"], BEAM)
    begun = []
    first.add_done_callback(lambda _: begun.append(served.worker.texts()))
    served.worker.finish()
    await asyncio.sleep(0)
    assert begun == [["b"]]


@played
async def test_a_lone_client_does_not_wait_for_company_and_several_do(start):
    served = start(batch_wait=0.05)
    served.submit(["a"], BEAM)
    assert served.worker.texts() == ["a"]  # at once
    served.submit(["b"], BEAM)
    await asyncio.sleep(0.001)
    served.submit(["c"], BEAM)
    served.worker.finish()
    await asyncio.sleep(0.1)
    assert served.worker.texts() == ["b", "c"]
    served.worker.finish()
    served.submit(["d"], BEAM)
    assert served.worker.texts() == ["b", "c"]  # there was company: perhaps more arrives
    await asyncio.sleep(0.1)
    assert served.worker.texts() == ["d"]


@played
async def test_a_client_that_leaves_frees_its_place(start):
    served = start(queue=2)
    (working,) = served.submit(["a"], BEAM)
    (waiting,) = served.submit(["b"], BEAM)
    (staying,) = served.submit(["c"], BEAM)
    with pytest.raises(QueueFull):
        served.submit(["d"], BEAM)
    waiting.cancel()
    working.cancel()
    await asyncio.sleep(0)
    assert len(served.queue) == 1 and served.worker.sent[-1] == Cancel(0)
    served.worker.on_message(PartDone([], True))  # the worker has given the batch up
    assert served.worker.texts() == ["c"]
    served.worker.finish()
    assert summaries([staying]) == ["of c"] and not served.answers


@played
async def test_a_result_that_comes_after_its_client_has_left_harms_nobody(start):
    served = start()
    first, second = served.submit(["a", "b"], BEAM)
    first.cancel()
    await asyncio.sleep(0)
    served.worker.finish()
    assert summaries([second]) == ["of b"]


@played
async def test_texts_of_a_worker_that_died_are_tried_again_each_alone(start):
    served = start()
    futures = served.submit(["a", "b", "c"], BEAM)
    served.worker.on_exit(-9)
    assert not served.is_ready
    served.worker.on_message(Ready(FACTS))
    assert served.worker.texts() == ["a"]
    served.worker.on_exit(-9)  # this one kills it again
    served.worker.on_message(Ready(FACTS))
    served.worker.finish()
    served.worker.finish()
    problems = [future.result().result.problem for future in futures]
    assert "the model's process ended" in problems[0] and problems[1:] == ["", ""]
    assert served.metrics.registry.get_sample_value("fairseq_el_worker_restarts_total") == 2


@played
async def test_a_worker_that_dies_while_it_loads_ends_the_server(start):
    served, failed = start(is_loaded=False), []
    served.on_failure = failed.append
    served.worker.on_exit(-9)
    assert "while it loaded the model" in failed[0]
    with pytest.raises(module.NotReady):
        served.check_open()


@played
async def test_tokens_reach_the_client_that_streams_and_no_other(start):
    served, mine, others = start(), [], []
    served.submit(["first"], BEAM)
    (stream,) = served.submit(["a"], BEAM, on_token=mine.append)
    served.submit(["b"], BEAM, on_token=others.append)
    served.worker.finish()
    batch = served.worker.sent[-1]
    job = next(text.job for text in batch.texts if text.text == "a")
    for token in ("fast", " editor"):
        served.worker.on_message(Token(job, token))
    assert mine == ["fast", " editor"] and others == []
    stream.cancel()
    await asyncio.sleep(0)
    served.worker.on_message(Token(job, " late"))
    assert mine == ["fast", " editor"]


@played
async def test_a_server_that_ends_takes_nothing_new_and_finishes_the_rest(start):
    served = start()
    (accepted,) = served.submit(["a"], BEAM)
    served.refuse_new()
    with pytest.raises(module.NotReady):
        served.check_open()
    served.worker.finish()
    assert summaries([accepted]) == ["of a"]
