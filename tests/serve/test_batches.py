"""Which texts form the next batch: of the same options, of similar length, within its size, and none waits for ever."""

import random

import pytest

from fairseq_el.serve.batches import SPREAD, Job, Queue, QueueFull
from fairseq_el.serve.messages import Search

BEAM, GREEDY = Search("beam", "auto"), Search("greedy", "auto")
PER_TOKEN = 0.01  # seconds


def job(number: int, length: int, search: Search = BEAM, arrived: float = 0.0) -> Job:
    return Job(number, "x" * length, search, arrived=arrived)


def queue(*requests: list[Job], batch_size: int | None = 8, max_tokens: int | None = None, limit: int = 999) -> Queue:
    made = Queue(limit)
    made.rates.tokens_per_character, made.rates.seconds_per_token = 1.0, PER_TOKEN
    made.longest_text, made.batch_size, made.max_tokens = 1000, batch_size, max_tokens
    for jobs in requests:
        made.add(jobs)
    return made


def numbers(waiting: Queue) -> list[int]:
    return sorted(job.number for job in waiting.next_batch()[0])


def serve(waiting: Queue) -> list[list[Job]]:
    """All batches, one after the other."""
    batches = []
    while len(waiting):
        batch, _ = waiting.next_batch()
        for done in batch:
            assert waiting.remove(done)
        batches.append(batch)
    return batches


def test_texts_of_the_same_options_and_of_similar_length_form_a_batch():
    waiting = queue(*([job(n, length)] for n, length in enumerate([50, 400, 55, 60, 410])))
    waiting.add([job(9, 50, GREEDY)])
    assert [sorted(job.number for job in batch) for batch in serve(waiting)] == [[0, 2, 3], [9], [1, 4]]


def test_those_of_the_nearest_length_come_first_where_there_are_too_many():
    leader = job(9, 100, arrived=-10.0)
    others = [[job(n, length)] for n, length in enumerate([160, 60, 95, 110, 105])]
    assert numbers(queue([leader], *others, batch_size=3)) == [2, 4, 9]


def test_every_text_is_served_once_and_no_batch_exceeds_its_size():
    draw = random.Random(1)
    jobs = [job(n, draw.randint(1, 900), draw.choice([BEAM, GREEDY]), arrived=n / 100) for n in range(500)]
    batches = serve(queue(*([one] for one in jobs), batch_size=16, max_tokens=3000))
    assert sorted(one.number for batch in batches for one in batch) == list(range(500))
    for batch in batches:
        tokens = [one.tokens for one in batch]
        assert len(batch) <= 16 and len(batch) * max(tokens) <= 3000
        assert max(tokens) <= SPREAD**2 * min(tokens) and len({one.search for one in batch}) == 1
    assert len(batches) < 150


def test_a_text_longer_than_the_token_budget_has_a_batch_of_its_own():
    assert numbers(queue([job(0, 900)], [job(1, 900)], max_tokens=500)) == [0]


def test_a_short_text_passes_long_ones_that_came_shortly_before_it():
    waiting = queue(*([job(n, 900)] for n in range(20)), [job(99, 30, arrived=1.0)])
    assert numbers(waiting) == [99]


def test_the_last_texts_of_a_large_request_do_not_hold_up_another_client():
    large = [job(n, 100) for n in range(60)]
    waiting = queue(large, [job(99, 100, arrived=0.5)], batch_size=1)
    order = [batch[0].number for batch in serve(waiting)]
    assert order.index(99) <= 2 and order[-1] == 59


@pytest.mark.parametrize(("mine", "others"), [(900, 20), (20, 900)], ids=["long", "short"])
def test_no_text_starves_behind_an_endless_stream_of_others(mine, others):
    """One text among texts of another length, which arrive faster than they are served."""
    waiting = queue([job(0, mine)], batch_size=1)
    time, number = 0.0, 0
    while 0 in waiting.jobs:
        time += others * PER_TOKEN
        for _ in range(2):
            number += 1
            waiting.add([job(number, others, arrived=time)])
        batch, _ = waiting.next_batch()
        waiting.remove(batch[0])
        assert time < 3 * (mine + others) * PER_TOKEN


def test_a_batch_is_full_when_nothing_can_join_it():
    texts = [[job(n, 100)] for n in range(4)]
    assert queue(*texts, batch_size=4).next_batch()[1] and queue(*texts, batch_size=3).next_batch()[1]
    assert queue(*texts, batch_size=None, max_tokens=350).next_batch()[1]
    assert not queue(*texts, batch_size=5).next_batch()[1]


def test_a_full_queue_takes_all_texts_of_a_request_or_none_and_says_when_to_try_again():
    waiting = queue([job(n, 400) for n in range(3)], limit=4)
    with pytest.raises(QueueFull) as refused:
        waiting.add([job(8, 400), job(9, 400)])
    assert len(waiting) == 3 and refused.value.retry_after == pytest.approx(3 * 400 * PER_TOKEN, abs=1)
    waiting.add([job(8, 400)])
    assert len(waiting) == 4


def test_texts_with_which_a_worker_died_are_tried_alone_and_first():
    waiting = queue([job(0, 50)], [job(1, 50)])
    waiting.put_back([job(7, 50), job(8, 50)])
    assert [[one.number for one in batch] for batch in serve(waiting)] == [[7], [8], [0, 1]]


def test_the_estimate_of_tokens_follows_the_results():
    waiting = queue()
    for _ in range(100):
        waiting.rates.learn(characters=1000, tokens=250, seconds=0.5)
    waiting.add([job(0, 400)])
    assert waiting.jobs[0].tokens == pytest.approx(100, abs=2)
    assert waiting.rates.seconds_per_token == pytest.approx(0.002, rel=0.01)
