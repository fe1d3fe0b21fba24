"""How the next token is drawn: restrictions of the logits, and texts that grow by what is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Vocabulary

SHARPEST = 1e-6
"""The lowest temperature but 0: logits divided by less may leave fp32."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the restrictions apply in the order of the fields, the penalty first of all."""

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter, 0 always the most probable token (greedy)."""
    top_k: int | None = None
    """Draw from the k most probable tokens only (Fan et al. 2018, arXiv 1805.04833)."""
    top_p: float | None = None
    """Draw from the smallest set of most probable tokens that holds this probability (Holtzman et al. 2019,
    arXiv 1904.09751, section 3.1)."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that were in the prompt or the text before become less probable (CTRL: Keskar et al. 2019,
    arXiv 1909.05858, section 4.1, who take 1.2); 1 = none."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or SHARPEST <= self.temperature < math.inf):
            raise ValueError(f"temperature {self.temperature}: choose 0 (greedy) or a number from {SHARPEST} upward")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: choose at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: choose a probability above 0 and up to 1, or None for all tokens")
        if not 1 <= self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty {self.repetition_penalty}: choose 1 (none) or more")


def text_only(logits: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """[R, V] -> [R, vocabulary.size], without ids that the tokenizer lacks, and with -inf at special ones other than
    the end: they are no text."""
    allowed = np.ones(vocabulary.size, bool)
    allowed[[token for token in vocabulary.special if token != vocabulary.end]] = False
    return jnp.where(allowed, logits[:, : vocabulary.size], -jnp.inf)


def penalized(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """[R, V] with the logits of seen tokens divided by the penalty. Where CTRL's equation 2 would make a token of
    negative logit more probable, it is multiplied."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """[R, V] -> [R, V] with all but the k largest of each row at -inf (of equal ones the lower ids stay)."""
    values, ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, ids].set(values)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """[R, V] -> [R, V] with each row's nucleus kept, the rest at -inf: a token stays if those more probable than it
    hold less than p, so the most probable one always does."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    above = jnp.cumsum(probabilities, axis=-1) - probabilities
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(above < p)
    return jnp.where(kept, logits, -jnp.inf)


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token per row of logits [R, V], by the row's own key of `keys` [R] -> [R] int32."""
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Drawn(NamedTuple):
    """Texts as they are drawn, one in each of the B rows."""

    keys: jax.Array
    """[B]"""
    finished: jax.Array
    """[B] bool"""
    tokens: jax.Array
    """[B, steps] int32"""
    lengths: jax.Array
    """[B] int32: how many of them are the text."""

    @classmethod
    def begin(cls, keys: jax.Array, finished: jax.Array, steps: int, pad: int) -> Drawn:
        tokens = jnp.full((len(finished), steps), pad, jnp.int32)
        return cls(keys, finished, tokens, jnp.zeros(len(finished), jnp.int32))

    def grow(
        self, logits: jax.Array, step: jax.Array, vocabulary: Vocabulary, sampling: Sampling
    ) -> tuple[Drawn, jax.Array]:
        """The texts with a token more, by logits [B, V], and those tokens [B]: padding in rows that have ended."""
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, step)
        drawn = draw(logits, keys, sampling)
        finished = self.finished | (drawn == vocabulary.end)
        last = jnp.where(finished, vocabulary.pad, drawn)
        return Drawn(self.keys, finished, self.tokens.at[:, step].set(last), self.lengths + ~finished), last

    def written(self) -> tuple[jax.Array, jax.Array]:
        """Tokens [B, steps], and how many of each row are its text."""
        return self.tokens, self.lengths
