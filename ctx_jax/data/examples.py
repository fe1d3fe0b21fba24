"""Labelled examples, and the order in which they are read (supervised fine-tuning).

A batch is as long as its longest row, up to one of a few lengths: so there are few shapes, each compiled once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data.corpora import Split
from ctx_jax.data.readers import draw, shuffled
from ctx_jax.data.tokenizers import Encoding

SHORTEST = 8
"""Tokens of the shortest rows that a batch is made of."""


def lengths(longest: int) -> list[int]:
    """The lengths of batches, up to `longest`: powers of two and the numbers halfway between them."""
    powers = itertools.takewhile(lambda n: n < longest, (SHORTEST << step for step in itertools.count()))
    return [n for power in powers for n in (power, power * 3 // 2) if n < longest] + [longest]


@dataclass(frozen=True, eq=False)
class ExampleStore:
    """The examples of a split in tokens, in memory."""

    vocabulary: Vocabulary
    template: Any
    """How the model reads the texts of an example (`transfer.inputs.Template`)."""
    texts: Sequence[Sequence[Encoding]]
    """The one or two texts of each example."""
    labels: np.ndarray
    """[N] int32, a class, or float32, a number."""
    measure: Callable[[list[dict[str, np.ndarray]]], dict[str, float]]
    """The task's metrics of what was predicted, batch by batch."""
    corpus: str
    """The fingerprint of the task."""
    split: Split
    splitter: str = "none"
    """No sentences are looked for."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """[N]: tokens of each example's row, if nothing of it is cut."""
        special = np.array([self.template.special(len(texts)) for texts in self.texts])
        return special + [sum(len(text.ids) for text in texts) for texts in self.texts]

    @cached_property
    def by_size(self) -> np.ndarray:
        """[N]: the examples, shortest first."""
        return np.argsort(self.sizes, kind="stable")


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
        return -(-len(store.texts) // batch_size)

    def batch(self, store: ExampleStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """`contract.Batch` with `labels`; the ordered pass is from the shortest to the longest. Rows of padding are
        of example -1. Raises ValueError for fewer examples than rows."""
        count = len(store.texts)
        if seed is not None and count < batch_size:
            raise ValueError(f"{count} examples are too few for a batch of {batch_size}: choose a smaller batch_size")
        if seed is None:
            place = n * batch_size + np.arange(batch_size)
            example = np.where(place < count, store.by_size[np.minimum(place, count - 1)], -1)
            epoch = np.zeros_like(example)
        else:
            epoch, example = self._drawn(store, n, batch_size, seed)
        longest = np.minimum(store.sizes[example[example >= 0]], self.length).max(initial=1)
        sizes = lengths(self.length)
        length = sizes[int(np.searchsorted(sizes, longest))]

        mine = example[np.asarray(rows, np.int64)]
        texts = [store.texts[index] for index in mine if index >= 0]  # padding comes last
        batch = store.template.batch([store.template.row(text, self.length) for text in texts], len(mine), length)
        batch["labels"] = store.labels[np.maximum(mine, 0)]
        epoch = epoch[np.asarray(rows, np.int64)]
        return batch | {"example": mine.astype(np.int32), "epoch": epoch.astype(np.int32)}

    def _drawn(self, store: ExampleStore, n: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and example of each row of batch n: those of its pool, sorted by length, are dealt to its batches, and
        these put in another order."""
        pool, batch = divmod(n, self.pool)
        count = len(store.texts)
        size = self.pool * batch_size
        epoch, place = np.divmod(pool * size + np.arange(size), count)
        example = shuffled(place, count, seed, epoch)
        if self.pool == 1:
            return epoch, example
        order = np.argsort(store.sizes[example], kind="stable").reshape(self.pool, batch_size)
        mine = order[np.argsort(draw(seed, pool, np.arange(self.pool)), kind="stable")[batch]]
        return epoch[mine], example[mine]
