"""Generation: prompts are read at once into a cache, then one token at a time is chosen on the device.

    prompts -> buckets of static shape -> model.start -> while_loop(model.decode -> restrict -> choose) -> token lists

A row's text is a function of the model, its prompt and the seed: padding is on the left and belongs to no document,
positions count from the prompt's first token, and the random key is the row's own, so batch mates change nothing (up
to the rounding of another batch shape).

The loop is one program that is told when to come back: after the last token, or, where somebody watches, after a few.
"""

from __future__ import annotations

import zlib
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Variables, Vocabulary
from ctx_jax.generation.beams import NO_SEARCH, Beams, Hypotheses
from ctx_jax.generation.sampling import Drawn, Sampling, penalized, text_only

SMALLEST_BUCKET = 16
"""Prompts and lengths up to this many tokens share one compilation."""


class State(NamedTuple):
    """The loop's: R rows, B of them or, in beam search, B K."""

    step: jax.Array
    """Scalar int32: tokens chosen so far."""
    last: jax.Array
    """[R] int32: what the cache has not seen yet."""
    seen: jax.Array | None
    """[R, V] bool: tokens of prompt and text, if they are penalized."""
    texts: Drawn | Hypotheses
    cache: Any


def generate(
    model: Any,
    variables: Variables,
    vocabulary: Vocabulary,
    prompts: list[list[int]],
    *,
    length: int,
    sampling: Sampling,
    seed: int,
    search: Beams = NO_SEARCH,
) -> list[list[int]]:
    """Continues each prompt by at most `length` tokens; a row that ends sooner stops before its end token.

    The same prompt given twice gives two different texts, if they are drawn. One compilation serves every call whose
    number of prompts, longest prompt and length fall into the same powers of two. Raises ValueError if the model cannot
    generate, a prompt is empty or has a token outside the vocabulary, a text would pass the model's last position, or
    beam search is to draw.
    """
    check(model, vocabulary, prompts, length, sampling, seed, search)
    if not prompts:
        return []
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
    filled = prompts + [[vocabulary.begin]] * (rows - len(prompts))
    cache = _read(model, variables, left_padded(filled, width, vocabulary.pad), width + steps)
    finished, digests, repeats = np.arange(rows) >= len(prompts), *identities(filled)
    texts = _begin(vocabulary, finished, digests, repeats, np.uint32(seed), search=search, steps=steps)
    state = State(np.int32(0), last_tokens(filled), seen_tokens(filled, vocabulary, sampling), texts, cache)
    if search.beams > 1:
        state = _repeated(state, search.beams)
    state = _advance(model, variables, vocabulary, state, length, length, sampling=sampling, search=search)
    tokens, count = jax.device_get(state.texts.written())
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)][: len(prompts)]


def check(
    model: Any,
    vocabulary: Vocabulary,
    prompts: list[list[int]],
    length: int,
    sampling: Sampling,
    seed: int,
    search: Beams,
) -> None:
    """Raises ValueError for what `generate` cannot do with any number of positions."""
    if not hasattr(model, "decode"):
        raise ValueError(f"{type(model).__name__} cannot generate: it has no `decode`, choose a run of a causal model")
    if length < 1:
        raise ValueError(f"length {length}: generate at least 1 token")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: choose a number from 0 to {2**32 - 1}")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: give at least the begin token, {vocabulary.begin}")
        if not all(0 <= token < vocabulary.size for token in prompt):
            raise ValueError(f"prompt {row} has a token outside the vocabulary of {vocabulary.size}: use its tokenizer")
    if search.beams > 1:
        for name, draws in (
            ("temperature", sampling.temperature not in (0, 1)),
            ("top_k", sampling.top_k),
            ("top_p", sampling.top_p),
        ):
            if draws:
                raise ValueError(
                    f"{name} {getattr(sampling, name)}: beam search draws nothing, leave it out or choose 1 beam"
                )


def bucket(n: int, smallest: int) -> int:
    """The next power of two, at least `smallest`: the static size that stands for n."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def left_padded(prompts: list[list[int]], width: int, pad: int) -> Batch:
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


def last_tokens(prompts: list[list[int]]) -> np.ndarray:
    """[B]: what the first decode reads."""
    return np.array([prompt[-1] for prompt in prompts], np.int32)


def seen_tokens(prompts: list[list[int]], vocabulary: Vocabulary, sampling: Sampling) -> np.ndarray | None:
    """[B, V] bool: which tokens the prompts have, but for the end's; None if none is penalized."""
    if sampling.repetition_penalty == 1:
        return None
    seen = np.zeros((len(prompts), vocabulary.size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    seen[:, vocabulary.end] = False
    return seen


def identities(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """What a row's key is made of: a digest of its prompt, and how many equal prompts stand before it."""
    digests = [zlib.crc32(np.asarray(prompt, np.int64).tobytes()) for prompt in prompts]
    seen: Counter[int] = Counter()
    repeats = []
    for digest in digests:
        repeats.append(seen[digest])
        seen[digest] += 1
    return np.array(digests, np.uint32), np.array(repeats, np.int32)


@partial(jax.jit, static_argnames=("model", "slots"))
def _read(model: Any, variables: Variables, batch: Batch, slots: int) -> Any:
    """The cache of the prompts, with room for what follows."""
    return model.apply(variables, batch, slots, method="start")


@partial(jax.jit, static_argnames=("vocabulary", "search", "steps"))
def _begin(
    vocabulary: Vocabulary,
    finished: jax.Array,
    digests: jax.Array,
    repeats: jax.Array,
    seed: jax.Array,
    *,
    search: Beams,
    steps: int,
) -> Drawn | Hypotheses:
    """Texts of no tokens, one in each of the B rows."""
    if search.beams > 1:
        return Hypotheses.begin(finished, search.beams, steps, vocabulary.pad)
    root = jax.random.key(seed)
    fold = jax.vmap(lambda digest, repeat: jax.random.fold_in(jax.random.fold_in(root, digest), repeat))
    return Drawn.begin(fold(digests, repeats), finished, steps, vocabulary.pad)


@partial(jax.jit, static_argnames=("beams",))
def _repeated(state: State, beams: int) -> State:
    """B K rows of B: every hypothesis starts with its prompt."""
    rows = jnp.repeat(jnp.arange(len(state.last)), beams)
    seen = None if state.seen is None else state.seen[rows]
    return state._replace(last=state.last[rows], seen=seen, cache=state.cache.rows(rows))


@partial(jax.jit, static_argnames=("model", "vocabulary", "sampling", "search"), donate_argnames=("state",))
def _advance(
    model: Any,
    variables: Variables,
    vocabulary: Vocabulary,
    state: State,
    until: jax.Array,
    length: jax.Array,
    *,
    sampling: Sampling,
    search: Beams,
) -> State:
    """The state when `until` tokens are chosen, of `length` in all, or every text has ended."""

    def going_on(state: State) -> jax.Array:
        return (state.step < until) & ~state.texts.finished.all()

    def one_token(state: State) -> State:
        step, last, seen, texts, cache = state
        logits, cache = model.apply(variables, last[:, None], cache, method="decode")
        logits = text_only(logits, vocabulary)
        if seen is not None:
            logits = penalized(logits, seen, sampling.repetition_penalty)
        if isinstance(texts, Drawn):
            texts, last = texts.grow(logits, step, vocabulary, sampling)
        else:
            texts, last, origins = texts.grow(logits, step, length, vocabulary, search)
            cache, seen = cache.rows(origins), None if seen is None else seen[origins]
        if seen is not None:
            seen = seen.at[jnp.arange(len(last)), last].set(True)
        return State(step + 1, last, seen, texts, cache)

    return jax.lax.while_loop(going_on, one_token, state)
