"""Every sentence of a set is generated, and the end of a run says how many were."""

import sys
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from fairseq.data import FairseqDataset, data_utils
from fairseq.data.iterators import EpochBatchIterator

NAMED = 100
"""How many of the sentences that were left out are named."""


class Tally:
    """Counts sentences: in the batches of each set, left out of them, and generated so far."""

    def __init__(self) -> None:
        self.generated = 0
        self.sets: dict[FairseqDataset, tuple[int, list[int]]] = {}

    def report(self) -> str:
        left_out = [number for _, numbers in self.sets.values() for number in numbers]
        total = sum(batched for batched, _ in self.sets.values()) + len(left_out)
        line = f"fairseq_el | generated {self.generated:,} of {total:,} sentences"
        if not left_out:
            return line
        named = ", ".join(map(str, left_out[:NAMED]))
        more = f" and {len(left_out) - NAMED:,} more" if len(left_out) > NAMED else ""
        return f"{line}; left out {len(left_out):,} with invalid sizes: {named}{more}"

    def print_report(self) -> None:
        if self.generated and self.sets:  # fairseq-interactive has lines, and no set
            print(self.report(), file=sys.stderr, flush=True)


class AllSentences:
    """Mixed into tasks: their batches have all sentences of a set that is generated or validated.

    Stock fairseq drops the last batch unless its size is a multiple of `--required-batch-size-multiple`, 8 by
    default (fairseq issues 5036, 5094, 5351): with `--batch-size 1` always one sentence. Training is stock's.
    """

    datasets: dict[str, FairseqDataset]  # the task's

    @property
    def tally(self) -> Tally:
        return self.__dict__.setdefault("_tally", Tally())

    @property
    def left_out(self) -> MutableMapping[FairseqDataset, list[int]]:
        """By set, the sentences that don't fit the model and that the user asked to skip."""
        return self.__dict__.setdefault("_left_out", WeakKeyDictionary())

    def get_batch_iterator(self, dataset, max_tokens=None, max_sentences=None, *args, **options):
        iterator = super().get_batch_iterator(dataset, max_tokens, max_sentences, *args, **options)
        trains = "grouped_shuffling" in options  # which fairseq's trainer passes with its training set alone
        is_stock = isinstance(iterator, EpochBatchIterator) and not isinstance(iterator.batch_sampler, AllBatches)
        if is_stock and not trains:
            limits = {"max_tokens": max_tokens, "max_sentences": max_sentences}
            iterator.batch_sampler = AllBatches(iterator, self, limits)
            iterator._frozen_batches = None
        return iterator

    def filter_indices_by_size(self, indices, dataset, *args, **options):
        kept = super().filter_indices_by_size(indices, dataset, *args, **options)
        self.left_out[dataset] = np.setdiff1d(indices, kept).tolist()
        return kept


class AllBatches:
    """A batch sampler: stock's batches, and after them one of the sentences that they lack."""

    def __init__(self, iterator: EpochBatchIterator, task: AllSentences, limits: dict[str, Any]):
        self.sampler = iterator.batch_sampler
        self.seed = iterator.seed
        self.shard = slice(iterator.shard_id, None, iterator.num_shards)
        self.task = task
        self.limits = limits

    def __call__(self, dataset: FairseqDataset, epoch: int) -> list[list[int]]:
        batches = list(self.sampler(dataset, epoch) if callable(self.sampler) else self.sampler)
        with data_utils.numpy_seed(self.seed + epoch):
            ordered = np.asarray(dataset.ordered_indices())
        left_out = self.task.left_out.get(dataset, [])
        missing = ordered[~np.isin(ordered, np.concatenate([left_out, *batches]))]
        if missing.size:
            batches += list(dataset.batch_by_size(missing, required_batch_size_multiple=1, **self.limits))
        if dataset in self.task.datasets.values():
            self.task.tally.sets[dataset] = sum(map(len, batches[self.shard])), left_out
        return batches
