"""One text that can't be summarised, or too little memory, costs that text at most, and never what is finished."""

import json
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_el.cli import merge, summarize
from fairseq_el.errors import UserError
from fairseq_el.generation.non_finite import NotFinite, check_finite
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.kernels import ops
from helpers import GREEDY, exit_of, job, make_language_model, read_lines, write_lines
from helpers import TEXTS as WHOLE_TEXTS

TEXTS = [text[:100] for text in WHOLE_TEXTS]
BAD = 4  # the index of the text that fails
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("could not create a primitive"),
]


@pytest.fixture(scope="module")
def greedy():
    return Summarizer.load("demo", "demo", "greedy", max_len_b=8)


@pytest.fixture(scope="module")
def summaries(greedy):
    return greedy(TEXTS)


@pytest.fixture
def command(greedy, monkeypatch):
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: greedy)
    return lambda *words: exit_of(summarize, words, monkeypatch)


def own_token(summarizer: Summarizer, texts: list[str], index: int) -> int:
    """One that no other text has."""
    tokens = [set(summarizer.batcher.encode(text).tokens) for text in texts]
    return max(tokens[index].difference(*tokens[:index], *tokens[index + 1 :]))


class Memory:
    """Stands before the model and lets too large batches fail, and a text that fails alone."""

    def __init__(self, summarizer: Summarizer, monkeypatch, most: int = 99, bad_token: int | None = None):
        self.infer = summarizer.task.inference_step
        self.most, self.bad_token = most, bad_token
        self.error = OUT_OF_MEMORY[2]
        self.tried: list[int] = []
        self.done: list[list[int]] = []  # tokens of the texts that went through
        self.held = None
        monkeypatch.setattr(summarizer.task, "inference_step", self)

    def __call__(self, generator, models, sample):
        assert self.held is None or self.held() is None, "the failed attempt still takes memory"
        tensor = torch.zeros(1000)
        self.held = weakref.ref(tensor)
        rows = sample["net_input"]["src_tokens"]
        self.tried.append(len(rows))
        if len(rows) > self.most or (self.bad_token is not None and rows.eq(self.bad_token).any()):
            raise type(self.error)(*self.error.args)  # a new one, since a traceback holds on to all it has seen
        self.done += [[token for token in row if token > 2] for row in rows.tolist()]
        return self.infer(generator, models, sample)


# ---- memory


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_batch_is_halved_until_it_fits(greedy, summaries, monkeypatch, error):
    memory = Memory(greedy, monkeypatch, most=4)
    memory.error = error
    assert greedy(TEXTS) == summaries
    assert memory.tried == [24, 12, 6, 3, 3, 6, 3, 3, 12, 6, 3, 3, 6, 3, 3]


def test_other_errors_are_not_taken_for_a_lack_of_memory(greedy, monkeypatch):
    memory = Memory(greedy, monkeypatch, most=0)
    memory.error = RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")
    with pytest.raises(RuntimeError, match="must match"):
        greedy(TEXTS)
    assert memory.tried == [24]


def test_a_text_too_large_alone_ends_the_run_and_what_is_finished_stays(
    command, greedy, summaries, tmp_path, monkeypatch
):
    memory = Memory(greedy, monkeypatch, bad_token=own_token(greedy, TEXTS, BAD))
    words = job(tmp_path, TEXTS)
    said = command(*words)
    assert re.fullmatch(
        rf"summarize: error: line {BAD + 1} of \S+in can't be processed: there is not enough memory for it, even "
        "alone; what was finished is kept, leave it out with --resume --on-error skip",
        said,
    )
    assert 0 < len(memory.done) < 23 and sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.journal"]
    assert command(*words, "--resume", "--on-error", "skip") is None
    expected = [summary if place != BAD else "" for place, summary in enumerate(summaries)]
    assert read_lines(tmp_path / "out") == expected
    others = [greedy.batcher.encode(text).tokens for place, text in enumerate(TEXTS) if place != BAD]
    assert sorted(memory.done) == sorted([token for token in row if token > 2] for row in others)  # each once


def test_skipped_texts_are_named_by_id_counted_and_left_empty(
    command, greedy, summaries, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(greedy, "has_warned", False)
    Memory(greedy, monkeypatch, most=5, bad_token=own_token(greedy, TEXTS, BAD))
    records = [{"id": f"n-{n}", "text": text} for n, text in enumerate(TEXTS)]
    source = write_lines(tmp_path / "in.jsonl", map(json.dumps, records))
    words = ["--input", source, "--output", tmp_path / "out.jsonl", "--on-error", "skip"]
    assert command(*GREEDY, *words) is None
    found = [json.loads(line)["summary"] for line in read_lines(tmp_path / "out.jsonl")]
    assert found == [summary if place != BAD else "" for place, summary in enumerate(summaries)]
    warnings = re.findall("warning: (.*)", capsys.readouterr().err)
    assert warnings[0].startswith("memory does not suffice for 24 texts at a time")
    assert warnings[1:] == [
        f'line {BAD + 1} of {source} (id "n-{BAD}") was skipped: there is not enough memory for it, even alone',
        "1 of 24 texts were skipped because of errors: no output of them",
    ]


def test_skipped_texts_of_shards_are_counted_when_they_are_merged(command, greedy, tmp_path, monkeypatch, capsys):
    Memory(greedy, monkeypatch, bad_token=own_token(greedy, TEXTS, BAD))
    words = [*job(tmp_path, TEXTS), "--window", 4, "--on-error", "skip"]
    parts = [tmp_path / "first", tmp_path / "second"]
    for number, part in enumerate(parts, start=1):
        assert command(*words, "--shard", f"{number}/2", "--output", part) is None
    assert exit_of(merge, [*parts, "--output", tmp_path / "all"], monkeypatch) is None
    assert "24 texts of 2 shards" in (said := capsys.readouterr().out) and "1 were skipped" in said
    assert [place for place, line in enumerate(read_lines(tmp_path / "all")) if not line] == [BAD]


def test_in_python_a_failing_text_is_an_error_or_an_empty_summary(greedy, summaries, monkeypatch):
    Memory(greedy, monkeypatch, bad_token=own_token(greedy, TEXTS, BAD))
    with pytest.raises(UserError, match=f"text {BAD + 1} can't be processed: there is not enough memory"):
        greedy(TEXTS)
    found = greedy(TEXTS, on_error="skip")
    assert found == [summary if place != BAD else "" for place, summary in enumerate(summaries)]
    with pytest.raises(ValueError, match="abort, skip"):
        greedy(TEXTS, on_error="ignore")


# ---- NaN


def spoil(summarizer: Summarizer, token: int, value: float):
    """Has the model read a token as NaN or infinity; returns what ends that."""

    def hook(_, inputs, embedded):
        return embedded.masked_fill(inputs[0].eq(token).unsqueeze(-1), value)

    side = summarizer.model.encoder if hasattr(summarizer.model, "encoder") else summarizer.model.decoder
    return side.embed_tokens.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("search", "value"), [("greedy", "nan"), ("beam", "inf"), ("diverse", "nan"), ("stock", "nan"), ("stock", "inf")]
)
def test_nan_names_the_text_instead_of_summarising_it(search, value):
    is_stock = search == "stock"
    summarizer = Summarizer.load("demo", "demo", "beam" if is_stock else search, stock=is_stock, max_len_b=8)
    texts = TEXTS[:7]
    expected = summarizer(texts)
    hook = spoil(summarizer, own_token(summarizer, texts, BAD), float(value))
    with pytest.raises(UserError, match=f"text {BAD + 1} can't be processed: the model computes NaN"):
        summarizer(texts)
    assert summarizer(texts, on_error="skip") == [*expected[:BAD], "", *expected[BAD + 1 :]]
    hook.remove()
    assert summarizer(texts) == expected


@pytest.mark.parametrize("search", ["greedy", "topk"])
def test_nan_in_a_prompt_names_it(tmp_path, search):
    options = {"max_new_tokens": 5, "keep_sentences": None, "batch_size": 4}
    summarizer = Summarizer.load(make_language_model(tmp_path / "model"), "gpt2_cnndm", search, **options)
    texts = ["the cat sat", "the cat", "a cat", "the dog QQQ", "another text"]
    expected = summarizer(texts)
    spoil(summarizer, own_token(summarizer, texts, 3), float("nan"))
    with pytest.raises(UserError, match="text 4 can't be processed: the model computes NaN"):
        summarizer(texts)
    assert summarizer(texts, on_error="skip") == [*expected[:3], "", expected[4]]


@given(
    width=st.integers(1, 70),
    place=st.integers(0, 10**6),
    value=st.sampled_from([float("nan"), float("inf")]),
    fill=st.sampled_from([0.0, -1e30, 1e30, float("-inf"), float("inf"), float("nan")]),
)
def test_one_number_of_a_row_is_enough(width, place, value, fill):
    logits = torch.full((3, width), fill)
    logits[::2] = torch.randn(2, width)
    logits[1, place % width] = value
    for logsumexp in (ops.logsumexp, lambda x: torch.logsumexp(x, dim=-1)):
        with pytest.raises(NotFinite):
            check_finite(logsumexp(logits))


def test_large_numbers_are_no_infinity():
    logits = torch.tensor([[3e38, 1.0, float("-inf")], [3e38, 3e38, -3e38]])
    check_finite(ops.logsumexp(logits))


def test_damaged_weights_end_the_run_at_the_first_text(command, tmp_path, monkeypatch, greedy):
    weight = greedy.model.decoder.layers[0].final_layer_norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        said = command(*job(tmp_path, TEXTS))
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert re.match(r"summarize: error: line \d+ of \S+ can't be processed: the model computes NaN", said)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
