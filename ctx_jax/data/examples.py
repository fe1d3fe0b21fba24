"""Labelled examples, and the order in which they are read (supervised fine-tuning).

A batch is as long as its longest row, up to one of a few lengths: so there are few shapes, each compiled once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data.corpora import Split
from ctx_jax.data.readers import draw, shuffled

SHORTEST = 8
"""Tokens of the shortest rows that a batch is made of."""


def lengths(longest: int) -> list[int]:
    """The lengths of batches, up to `longest`: powers of two and the numbers halfway between them."""
    powers = itertools.takewhile(lambda n: n < longest, (SHORTEST << step for step in itertools.count()))
    return [n for power in powers for n in (power, power * 3 // 2) if n < longest] + [longest]


Outputs = list[dict[str, np.ndarray]]
"""What an objective found of rows, by batch: `example` [B], -1 = padding, and `scores` [B, ...]."""


def by_row(outputs: Outputs) -> Iterator[tuple[int, np.ndarray]]:
    """Each row that is no padding, and its scores."""
    for batch in outputs:
        for row, scores in zip(batch["example"].tolist(), batch["scores"], strict=True):
            if row >= 0:
                yield row, scores


@dataclass(frozen=True, eq=False)
class ExampleStore:
    """The examples of a split in tokens, in memory. An example is a row, or several where it is read in windows."""

    vocabulary: Vocabulary
    template: Any
    """How the model reads the texts of an example (`transfer.inputs.Template`)."""
    rows: Sequence[Any]
    """`transfer.inputs.Row`s, no longer than the reader's."""
    labels: Any
    """Of each row a class, int32 [N], or a number, float32 [N]."""
    measure: Callable[[Outputs], dict[str, float]]
    """The task's metrics of what was predicted."""
    corpus: str = ""
    """The fingerprint of the task."""
    split: Split = "train"
    splitter: str = "none"
    """No sentences are looked for."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """[N]: tokens of each row."""
        return np.array([len(row.tokens) for row in self.rows])

    @cached_property
    def cut(self) -> int:
        """How many rows had more text than there was room for."""
        return sum(row.cut for row in self.rows)

    @cached_property
    def by_size(self) -> np.ndarray:
        """[N]: the rows, shortest first."""
        return np.argsort(self.sizes, kind="stable")

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """These rows, -1 = padding, which comes last, with their `labels`."""
        batch = self.template.batch([self.rows[row] for row in rows if row >= 0], len(rows), length)
        batch["labels"] = self.labels[np.maximum(rows, 0)]
        return batch


@dataclass(frozen=True)
class Examples:
    """Rows of labelled examples, shuffled without replacement in training."""

    length: int = 128
    """Tokens in a row, at most: what is too much is cut."""
    pool: int = 1
    """The rows of so many batches are sorted by length among each other, which leaves less padding; 1 = as drawn."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} {value}: choose 1 or more")

    def passes(self, store: ExampleStore, batch_size: int) -> int:
        """Batches in a pass. Training goes on without a break: its batches may hold rows of two epochs."""
        return -(-len(store.rows) // batch_size)

    def batch(self, store: ExampleStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """`contract.Batch` with `labels`; the ordered pass is from the shortest to the longest. Rows of padding are
        of example -1. Raises ValueError for fewer examples than rows."""
        count = len(store.rows)
        if seed is not None and count < batch_size:
            raise ValueError(f"{count} examples are too few for a batch of {batch_size}: choose a smaller batch_size")
        if seed is None:
            place = n * batch_size + np.arange(batch_size)
            example = np.where(place < count, store.by_size[np.minimum(place, count - 1)], -1)
            epoch = np.zeros_like(example)
        else:
            epoch, example = self._drawn(store, n, batch_size, seed)
        longest = store.sizes[example[example >= 0]].max(initial=1)
        sizes = lengths(self.length)
        length = sizes[int(np.searchsorted(sizes, longest))]

        mine = example[np.asarray(rows, np.int64)]
        batch = store.batch(mine, length)
        epoch = epoch[np.asarray(rows, np.int64)]
        return batch | {"example": mine.astype(np.int32), "epoch": epoch.astype(np.int32)}

    def _drawn(self, store: ExampleStore, n: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and example of each row of batch n: those of its pool, sorted by length, are dealt to its batches, and
        these put in another order."""
        pool, batch = divmod(n, self.pool)
        count = len(store.rows)
        size = self.pool * batch_size
        epoch, place = np.divmod(pool * size + np.arange(size), count)
        example = shuffled(place, count, seed, epoch)
        if self.pool == 1:
            return epoch, example
        order = np.argsort(store.sizes[example], kind="stable").reshape(self.pool, batch_size)
        mine = order[np.argsort(draw(seed, pool, np.arange(self.pool)), kind="stable")[batch]]
        return epoch[mine], example[mine]


@dataclass(frozen=True)
class Windows(Examples):
    """Rows of texts that may be longer than a row: these are read in overlapping windows, and nothing is cut."""

    length: int = 384
    """Tokens in a row, at most."""
    stride: int = 128
    """Tokens of text from one window to the next, at most; where a row has room for fewer, so many."""

    def starts(self, count: int, room: int) -> range:
        """Where the windows of `room` tokens begin that read `count`: none is left out, the last may be short."""
        step = min(self.stride, room)
        return range(0, max(count - room, 0) + step, step)

    def best(self, count: int, room: int) -> np.ndarray:
        """[count]: for each token the number of the window in which it has the most context on its poorer side, of
        equal ones the longer, of these the first (Devlin et al. 2018's run_squad.py)."""
        start = np.array(self.starts(count, room))[:, None]
        size = np.minimum(room, count - start)
        place = np.arange(count) - start
        inside = (place >= 0) & (place < size)
        context = np.where(inside, np.minimum(place, size - 1 - place) + 0.01 * size, -1.0)
        return context.argmax(0)
