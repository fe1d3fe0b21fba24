"""What a model sees of a text that grows: how its cache is made, and made anew where it is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from ctx_jax.contract import Batch

Read = Callable[[Batch, int], Any]
"""The cache of a batch of prompts, with so many slots."""

SMALLEST_BUCKET = 16
"""Prompts and lengths up to this many tokens share one compilation."""


class View(Protocol):
    """Keeps the cache of the loop."""

    @property
    def visible(self) -> np.int32 | None:
        """How many tokens a new one sees, itself included; None = all that are in the cache."""
        ...

    def renew(self, cache: Any, texts: Sequence[list[int]], ended: np.ndarray) -> tuple[Any, int]:
        """A cache that goes on, and how many tokens it has room for: of all texts but for their last tokens, which the
        next step reads. `cache` is the one that is full, None at first; what becomes of texts that have ended does not
        matter."""
        ...


@dataclass(frozen=True)
class Whole:
    """All of a text, or its last `visible` tokens by relative positions: what nobody sees any more makes room."""

    read: Read
    pad: int
    width: int
    """Slots for the prompts."""
    slots: int
    visible: np.int32 | None = None

    def renew(self, cache: Any, texts: Sequence[list[int]], ended: np.ndarray) -> tuple[Any, int]:
        if cache is None:
            return self.read(left_padded(texts, self.width, self.pad), self.slots), self.slots - self.width
        assert self.visible is not None
        dropped = self.slots - (int(self.visible) - 1)
        return drop(cache, np.int32(dropped)), dropped


@dataclass
class Reread:
    """The last `window` tokens, read anew as soon as a text has no position left, as if it began there."""

    read: Read
    pad: int
    positions: int
    window: int
    starts: dict[int, int] = field(default_factory=dict)
    """Where in its text each row began the last time."""
    visible: None = None

    def renew(self, cache: Any, texts: Sequence[list[int]], ended: np.ndarray) -> tuple[Any, int]:
        seen = []
        for row, text in enumerate(texts):
            if len(text) - self.starts.get(row, 0) > self.positions:
                self.starts[row] = len(text) - self.window
            seen.append(text[-1:] if ended[row] else text[self.starts.get(row, 0) :])
        longest = max(map(len, seen))
        cache = self.read(left_padded(seen, self.positions - 1, self.pad), self.positions)
        return drop(cache, np.int32(self.positions - longest)), self.positions + 1 - longest


def view(config: Any, longest: int, length: int, window: int | None, read: Read, pad: int) -> tuple[View, int]:
    """How prompts of up to `longest` tokens are seen while `length` more are written, and the bucket of that length.

    Raises ValueError for a text that passes the last position, and for a window that the model cannot have.
    """
    width, steps = bucket(longest - 1, SMALLEST_BUCKET), bucket(length, SMALLEST_BUCKET)
    positions = getattr(config, "max_length", None)
    if window is not None and not 1 <= window <= (positions or window):
        most = "or more" if positions is None else f"to {positions}, the model's positions"
        raise ValueError(f"window {window}: choose 1 {most}")
    if positions is None:
        slots = width + steps
        if window is not None:
            slots = min(slots, max(width, window - 1) + bucket(window, SMALLEST_BUCKET))
        return Whole(read, pad, width, slots, None if window is None else np.int32(window)), steps
    if longest + length - 1 <= positions:
        width = min(width, positions - length)
        return Whole(read, pad, width, width + min(steps, positions - width)), min(steps, positions - width)
    if window is not None:
        return Reread(read, pad, positions, window), steps
    raise ValueError(
        f"a prompt of {longest} tokens and {length} more pass the model's {positions} positions: "
        f"generate at most {max(0, positions + 1 - longest)}, shorten the prompt or choose a window"
    )


@jax.jit
def drop(cache: Any, count: jax.Array) -> Any:
    """The cache without its first slots."""
    return cache.drop(count)


def bucket(n: int, smallest: int) -> int:
    """The next power of two, at least `smallest`: the static size that stands for n."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def left_padded(prompts: Sequence[list[int]], width: int, pad: int) -> Batch:
    """Prompts of any length, but for their last tokens, as one batch [B, width]: document 1, padding in front as
    document 0."""
    tokens = np.full((len(prompts), width), pad, np.int32)
    starts = np.full((len(prompts), 1), width, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row] = width + 1 - len(prompt)
        tokens[row, starts[row, 0] :] = prompt[:-1]
    columns = np.arange(width, dtype=np.int32)
    return {
        "tokens": tokens,
        "documents": (columns >= starts).astype(np.int32),
        "positions": np.maximum(columns - starts, 0),
    }
