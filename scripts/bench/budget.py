"""The largest batch that fits a memory budget, weights included.

The bytes cached for a sentence follow from `fairseq_el/models/costs.py`. The rest is measured: the process with its
weights, and the working memory of encoder and decoding steps.
"""

from dataclasses import dataclass
from typing import Any

from bench.tasks import Model, Task
from fairseq_el.models.costs import largest_batch

GIB = 2**30
PAPERS_LARGEST = 320
STOCK_FORMS = ("copied", "stock", "no-cache")


@dataclass(frozen=True)
class Footprint:
    """Of one worker: bytes before a batch, and for each sentence while it is encoded, and for each row of a step."""

    resident: int
    encoding: float = 0.0
    stepping: float = 0.0

    @classmethod
    def of(cls, task: Task, record: dict[str, Any], form: str) -> "Footprint":
        """From a small batch that was decoded in parts. The rows' share is what exceeds the state's formula."""
        parts = record["parts"]
        working = record["memory"]["peak"] - parts["resident_bytes"] - record["batch"] * state_bytes(
            task.model, record["beam"], task.longest_source, task.output_length, form
        )
        rows = record["batch"] * record["beam"]
        # fairseq_el encodes sources, and reads prompts, in groups: that takes the same for any number of them
        grows = form in STOCK_FORMS and parts["sources"]
        encoding = parts["source_peak_bytes"] / parts["sources"] if grows else 0.0
        return cls(parts["resident_bytes"], encoding, max(0.0, working / rows))

    @classmethod
    def guess(cls, task: Task, is_stock: bool) -> "Footprint":
        """For time plans, before anything is measured. Stock fairseq's encoder holds a whole batch's attention."""
        grows = is_stock and not task.model.is_language_model
        encoding = 8.0 * task.longest_source**2 * task.model.heads if grows else 0.0
        return cls(4 * task.model.parameters + 700_000_000, encoding, 16.0 * task.model.vocabulary)

    def peak(self, model: Model, batch: int, beam: int, source: int, output: int, form: str) -> float:
        """Bytes that a batch is expected to take at its peak."""
        state = batch * state_bytes(model, beam, source, output, form)
        return self.resident + max(batch * self.encoding, state + batch * beam * self.stepping)

    def largest(self, model: Model, beam: int, source: int, output: int, form: str, budget: int, most: int) -> int:
        """At most `most`; 0 if not even one sentence fits."""
        left = budget - self.resident

        def fits(batch: int) -> bool:
            room = int(left - batch * beam * self.stepping)
            most = state_batch(model, beam, source, output, form, room) if room > 0 else 0
            return batch <= most and batch * self.encoding <= left

        return max((batch for batch in range(1, most + 1) if fits(batch)), default=0)


def state_batch(model: Model, beam: int, source: int, output: int, form: str, room: int) -> int:
    """How many sentences' state fits `room` bytes. form: `copied` and `stock` (multi-head attention in stock
    fairseq), `always`, and `auto`, which is given room for K and V."""
    shape, options = model.shape(1, beam, source), {}
    if model.is_language_model:
        if form in ("copied", "stock"):  # prompts are steps, and every beam keeps them
            shape, output = model.shape(1, beam, 0), source + output
        options = {"layers_with_states": model.layers if form == "always" else 0}
    keeps_states = form == "always" or (model.is_language_model and form in ("copied", "stock"))
    copied = form == "copied" or (form == "stock" and not model.shares_cache)
    kind = "always" if keeps_states else "never"
    return largest_batch(shape, model.layers, room, output, form=kind, copied=copied, **options)


def state_bytes(model: Model, beam: int, source: int, output: int, form: str) -> float:
    """Of one sentence."""
    room = 2**50
    return room / state_batch(model, beam, source, output, form, room)
