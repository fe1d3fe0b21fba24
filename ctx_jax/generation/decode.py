"""Generation: prompts are read at once into a cache, then one token at a time is drawn on the device.

    prompts -> buckets of static shape -> model.start -> while_loop(model.decode -> restrict -> draw) -> token lists

A row's text is a function of the model, its prompt and the seed: padding is on the left and belongs to no document,
positions count from the prompt's first token, and the random key is the row's own, so batch mates change nothing (up
to the rounding of another batch shape).
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Variables, Vocabulary

SMALLEST_BUCKET = 16
"""Prompts and lengths up to this many tokens share one compilation."""
SHARPEST = 1e-6
"""The lowest temperature but 0: logits divided by less may leave fp32."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the restrictions apply in the order of the fields."""

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter, 0 always the most probable token (greedy)."""
    top_k: int | None = None
    """Draw from the k most probable tokens only (Fan et al. 2018, arXiv 1805.04833)."""
    top_p: float | None = None
    """Draw from the smallest set of most probable tokens that holds this probability (Holtzman et al. 2019,
    arXiv 1904.09751, section 3.1)."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or SHARPEST <= self.temperature < math.inf):
            raise ValueError(f"temperature {self.temperature}: choose 0 (greedy) or a number from {SHARPEST} upward")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: choose at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: choose a probability above 0 and up to 1, or None for all tokens")


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """[B, V] -> [B, V] with all but the k largest of each row at -inf (of equal ones the lower ids stay)."""
    values, ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, ids].set(values)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """[B, V] -> [B, V] with each row's nucleus kept, the rest at -inf: a token stays if those more probable than it
    hold less than p, so the most probable one always does."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    above = jnp.cumsum(probabilities, axis=-1) - probabilities
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(above < p)
    return jnp.where(kept, logits, -jnp.inf)


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token per row of logits [B, V], by the row's own key of `keys` [B] -> [B] int32."""
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def text_only(logits: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """[B, V] with -inf where no text can be: special ids other than the end, and ids that the tokenizer lacks."""
    banned = [token for token in vocabulary.special if token != vocabulary.end]
    logits = logits.at[:, jnp.array(banned)].set(-jnp.inf)
    return jnp.where(jnp.arange(logits.shape[-1]) < vocabulary.size, logits, -jnp.inf)


def generate(
    model: Any,
    variables: Variables,
    vocabulary: Vocabulary,
    prompts: list[list[int]],
    *,
    length: int,
    sampling: Sampling,
    seed: int,
) -> list[list[int]]:
    """Continues each prompt by at most `length` tokens; a row that ends sooner stops before its end token.

    The same prompt given twice gives two different texts. One compilation serves every call whose number of prompts,
    longest prompt and length fall into the same powers of two. Raises ValueError if the model cannot generate, a
    prompt is empty or has a token outside the vocabulary, or a text would pass the model's last position.
    """
    if not hasattr(model, "decode"):
        raise ValueError(f"{type(model).__name__} cannot generate: it has no `decode`, choose a run of a causal model")
    if length < 1:
        raise ValueError(f"length {length}: generate at least 1 token")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: choose a number from 0 to {2**32 - 1}")
    if not prompts:
        return []
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: give at least the begin token, {vocabulary.begin}")
        if not all(0 <= token < vocabulary.size for token in prompt):
            raise ValueError(f"prompt {row} has a token outside the vocabulary of {vocabulary.size}: use its tokenizer")
    longest = max(map(len, prompts))
    width, steps = bucket(longest - 1, SMALLEST_BUCKET), bucket(length, SMALLEST_BUCKET)
    last = getattr(model.config, "max_length", None)
    if last is not None:
        if longest + length - 1 > last:
            raise ValueError(
                f"a prompt of {longest} tokens and {length} more pass the model's {last} positions: "
                f"generate at most {max(0, last + 1 - longest)} or shorten the prompt"
            )
        width = min(width, last - length)
        steps = min(steps, last - width)
    rows = bucket(len(prompts), 1)
    digests, repeats = identities(prompts)
    tokens, count = _generate(
        model,
        variables,
        vocabulary,
        left_padded([prompt[:-1] for prompt in prompts], rows, width, vocabulary.pad),
        np.array([prompt[-1] for prompt in prompts] + [vocabulary.begin] * (rows - len(prompts)), np.int32),
        np.pad(digests, (0, rows - len(prompts))),
        np.pad(repeats, (0, rows - len(prompts))),
        np.arange(rows) >= len(prompts),
        length,
        np.uint32(seed),
        sampling=sampling,
        steps=steps,
    )
    return [row[:n].tolist() for row, n in zip(*jax.device_get((tokens, count)), strict=True)][: len(prompts)]


def bucket(n: int, smallest: int) -> int:
    """The next power of two, at least `smallest`: the static size that stands for n."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def left_padded(prompts: list[list[int]], rows: int, width: int, pad: int) -> Batch:
    """Prompts of any length as one batch [rows, width]: document 1, padding in front as document 0."""
    tokens = np.full((rows, width), pad, np.int32)
    starts = np.full((rows, 1), width, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row] = width - len(prompt)
        tokens[row, starts[row, 0] :] = prompt
    columns = np.arange(width, dtype=np.int32)
    return {
        "tokens": tokens,
        "documents": (columns >= starts).astype(np.int32),
        "positions": np.maximum(columns - starts, 0),
    }


def identities(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """What a row's key is made of: a digest of its prompt, and how many equal prompts stand before it."""
    digests = [zlib.crc32(np.asarray(prompt, np.int64).tobytes()) for prompt in prompts]
    seen: Counter[int] = Counter()
    repeats = []
    for digest in digests:
        repeats.append(seen[digest])
        seen[digest] += 1
    return np.array(digests, np.uint32), np.array(repeats, np.int32)


@partial(jax.jit, static_argnames=("model", "vocabulary", "sampling", "steps"))
def _generate(
    model: Any,
    variables: Variables,
    vocabulary: Vocabulary,
    batch: Batch,
    last: jax.Array,
    digests: jax.Array,
    repeats: jax.Array,
    finished: jax.Array,
    length: jax.Array,
    seed: jax.Array,
    *,
    sampling: Sampling,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Generated tokens [B, steps] and how many of each row count [B]. `last` [B] is each prompt's last token: the cache
    holds what stands before it, and the first decode reads it."""
    rows, width = batch["tokens"].shape
    root = jax.random.key(seed)
    keys = jax.vmap(lambda digest, repeat: jax.random.fold_in(jax.random.fold_in(root, digest), repeat))(
        digests, repeats
    )
    cache = model.apply(variables, batch, width + steps, method="start")

    def going_on(state: Any) -> jax.Array:
        step, _, finished, _, _, _ = state
        return (step < length) & ~finished.all()

    def one_token(state: Any) -> Any:
        step, last, finished, count, tokens, cache = state
        logits, cache = model.apply(variables, last[:, None], cache, method="decode")
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        drawn = draw(text_only(logits, vocabulary), step_keys, sampling)
        finished = finished | (drawn == vocabulary.end)
        last = jnp.where(finished, vocabulary.pad, drawn)
        return step + 1, last, finished, count + ~finished, tokens.at[:, step].set(last), cache

    tokens = jnp.full((rows, steps), vocabulary.pad, jnp.int32)
    start = (jnp.int32(0), last, finished, jnp.zeros(rows, jnp.int32), tokens, cache)
    _, _, _, count, tokens, _ = jax.lax.while_loop(going_on, one_token, start)
    return tokens, count
