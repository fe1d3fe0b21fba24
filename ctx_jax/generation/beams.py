"""Beam search: the text of highest probability, as far as a few hypotheses at a time find it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ctx_jax.contract import Vocabulary


@dataclass(frozen=True)
class Beams:
    """How widely to search, and what is best: the sum of log-probabilities divided by the length penalty (Wu et al.
    2016, arXiv 1609.08144, section 7, equation 14)."""

    beams: int = 1
    """Hypotheses that are kept at each step; 1 = no search, tokens are drawn one by one."""
    length_penalty: float = 0.6
    """a in ((5 + n) / 6)^a, n the generated tokens with the end: 0 favours short texts, more favours longer ones."""

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams {self.beams}: choose 1 (no search) or more")
        if not 0 <= self.length_penalty < math.inf:
            raise ValueError(f"length_penalty {self.length_penalty}: choose 0 (none) or more")

    def score(self, total: jax.Array, count: jax.Array) -> jax.Array:
        """Log-probabilities of texts of `count` generated tokens, as they are compared."""
        return total / ((5 + count) / 6) ** self.length_penalty


NO_SEARCH = Beams()


class Hypotheses(NamedTuple):
    """The K hypotheses that go on in each of the B rows, and the best of those that have ended."""

    total: jax.Array
    """[B, K]: log-probability."""
    tokens: jax.Array
    """[B, K, steps] int32"""
    best: jax.Array
    """[B]: score of the best that has ended."""
    best_tokens: jax.Array
    """[B, steps] int32"""
    best_count: jax.Array
    """[B] int32: its tokens without the end."""
    finished: jax.Array
    """[B] bool: none that goes on can become better."""

    @classmethod
    def begin(cls, finished: jax.Array, beams: int, steps: int, pad: int) -> Hypotheses:
        """One hypothesis of no tokens in each row; the others, all alike, do not count yet."""
        rows = len(finished)
        tokens = jnp.full((rows, beams, steps), pad, jnp.int32)
        total = jnp.full((rows, beams), -jnp.inf).at[:, 0].set(0.0)
        nothing = jnp.zeros(rows, jnp.int32)
        return cls(total, tokens, jnp.full(rows, -jnp.inf), tokens[:, 0], nothing, finished)

    def grow(
        self, logits: jax.Array, step: jax.Array, length: jax.Array, vocabulary: Vocabulary, search: Beams
    ) -> tuple[Hypotheses, jax.Array, jax.Array]:
        """The hypotheses with a token more, by logits [B K, V]; those tokens, and the rows that they go on from, [B K].

        Of the 2 K best continuations K at least do not end, and go on. One that ends counts if it is among the K best.
        A text of `length` tokens counts as it is, without its end.
        """
        rows, beams = self.total.shape
        total = self.total[..., None] + jax.nn.log_softmax(logits, axis=-1).reshape(rows, beams, -1)
        size = total.shape[-1]
        values, places = jax.lax.top_k(total.reshape(rows, -1), min(2 * beams, beams * size))
        origins, drawn = places // size, (places % size).astype(jnp.int32)
        ends, within = drawn == vocabulary.end, jnp.arange(values.shape[1]) < beams

        here = jnp.arange(rows)
        ended = search.score(jnp.where(ends & within, values, -jnp.inf), step + 1)
        winner = ended.argmax(-1)
        better = ~self.finished & (ended[here, winner] > self.best)
        best = jnp.where(better, ended[here, winner], self.best)
        best_tokens = jnp.where(better[:, None], self.tokens[here, origins[here, winner]], self.best_tokens)
        best_count = jnp.where(better, step, self.best_count)

        total, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, values), beams)
        origins, drawn = (jnp.take_along_axis(x, chosen, axis=1) for x in (origins, drawn))
        tokens = jnp.take_along_axis(self.tokens, origins[..., None], axis=1).at[:, :, step].set(drawn)

        # A total only falls: nothing that goes on can be better than it is now at the full length.
        longest = search.score(total[:, 0], length)
        last = step + 1 == length
        better = ~self.finished & last & (longest > best)
        best = jnp.where(better, longest, best)
        best_tokens = jnp.where(better[:, None], tokens[:, 0], best_tokens)
        best_count = jnp.where(better, length, best_count)
        finished = self.finished | last | (longest <= best)
        grown = Hypotheses(total, tokens, best, best_tokens, best_count, finished)
        return grown, drawn.reshape(-1), (here[:, None] * beams + origins).reshape(-1)

    def written(self) -> tuple[jax.Array, jax.Array]:
        """Tokens [B, steps] of the best text of each row, and how many they are."""
        return self.best_tokens, self.best_count
