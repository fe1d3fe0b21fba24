"""Generation: prompts are read at once into a cache, then one token at a time is chosen on the device.

    prompts -> buckets of static shape -> model.start -> while_loop(model.decode -> restrict -> choose) -> token lists

A row's text is a function of the model, its prompt and the seed: padding is on the left and belongs to no document,
positions count from the prompt's first token, and the random key is the row's own, so batch mates change nothing (up
to the rounding of another batch shape).

The loop is one program that is told when to come back: after the last token, after a few where somebody watches, or
where the window slides.
"""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Variables, Vocabulary
from ctx_jax.generation import windows
from ctx_jax.generation.beams import NO_SEARCH, Beams, Hypotheses
from ctx_jax.generation.sampling import Drawn, Sampling, penalized, text_only
from ctx_jax.generation.windows import bucket
from ctx_jax.layers.embeddings import in_dtype
from ctx_jax.layers.stack import apart

Watch = Callable[[list[list[int]]], Sequence[bool]]
"""Is given the tokens of all rows so far, and says which rows are to end."""

MATRICES = ("kernel", "embedding")
"""Names of parameters that are multiplied in the compute dtype; the others are small, or summed in fp32."""


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
    window: int | None = None,
    watch: Watch | None = None,
    every: int = 1,
) -> list[list[int]]:
    """Continues each prompt by at most `length` tokens; a row that ends sooner stops before its end token.

    The same prompt given twice gives two different texts, if they are drawn. One compilation serves every call whose
    number of prompts, longest prompt and length fall into the same powers of two.

    Args:
        window: the text that a model goes on from when it gets long. With learned positions, those that are used up
            begin again: the row's last `window` tokens are read anew, as if the text began there. With relative ones
            each new token sees the `window` last ones, itself included, and what they have seen: a memory of
            `window` - 1 positions (Dai et al. 2019, section 3.2) after a first segment, the prompt.
        watch: called after every `every` tokens.

    Raises ValueError if the model cannot generate, a prompt is empty or has a token outside the vocabulary, a text
    would pass the model's last position and there is no window, or beam search is given what it does not do.
    """
    check(model, vocabulary, prompts, length, sampling, seed, search)
    if (window or watch) and search.beams > 1:
        raise ValueError(
            "beam search knows its text at the end only, and reads none of it anew: leave out window and watch, or "
            "choose 1 beam"
        )
    if not prompts:
        return []
    rows = bucket(len(prompts), 1)
    filled = prompts + [[vocabulary.begin]] * (rows - len(prompts))
    read = partial(_read, model, variables)
    view, steps = windows.view(model.config, max(map(len, prompts)), length, window, read, vocabulary.pad)
    stopped, digests, repeats = np.arange(rows) >= len(prompts), *identities(filled)
    texts = _begin(vocabulary, stopped, digests, repeats, np.uint32(seed), search=search, steps=steps)
    last = jnp.array([prompt[-1] for prompt in filled], jnp.int32)
    cache, room = view.renew(None, filled, stopped)
    state = State(jnp.int32(0), last, seen_tokens(filled, vocabulary, sampling), texts, cache)
    if search.beams > 1:
        state = _repeated(state, search.beams)
    ready = _ready(model, variables)
    step, slide = 0, room
    while True:
        until = min(length, slide, step + every if watch else length)
        limits = np.int32(until), np.int32(length), view.visible
        state = _advance(model, ready, vocabulary, state, stopped, limits, sampling=sampling, search=search)
        (tokens, count), ended, step = jax.device_get((state.texts.written(), state.texts.finished, state.step))
        written = [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]
        if watch:
            ended = ended | np.pad(np.array(watch(written[: len(prompts)]), bool), (0, rows - len(prompts)))
        if step == length or ended.all():
            return written[: len(prompts)]
        stopped = ended
        if step == slide:
            cache, room = view.renew(state.cache, [*map(operator.add, filled, written)], ended)
            state, slide = state._replace(cache=cache), step + room


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


def seen_tokens(prompts: list[list[int]], vocabulary: Vocabulary, sampling: Sampling) -> jax.Array | None:
    """[B, V] bool: which tokens the prompts have, but for the end's; None if none is penalized."""
    if sampling.repetition_penalty == 1:
        return None
    seen = np.zeros((len(prompts), vocabulary.size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    seen[:, vocabulary.end] = False
    return jnp.asarray(seen)


def identities(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """What a row's key is made of: a digest of its prompt, and how many equal prompts stand before it."""
    digests = [zlib.crc32(np.asarray(prompt, np.int64).tobytes()) for prompt in prompts]
    seen: Counter[int] = Counter()
    repeats = []
    for digest in digests:
        repeats.append(seen[digest])
        seen[digest] += 1
    return np.array(digests, np.uint32), np.array(repeats, np.int32)


@partial(jax.jit, static_argnames=("model",))
def _ready(model: Any, variables: Variables) -> Variables:
    """The variables as a step wants them: the layers' apart, and matrices in the dtype in which they are multiplied, so
    that a token costs one reading of them."""

    def narrow(path: Any, leaf: jax.Array) -> jax.Array:
        return in_dtype(leaf, model.config.dtype) if path[-1].key in MATRICES else leaf

    def with_layers_apart(tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {name: apart(part) if name == "layers" else with_layers_apart(part) for name, part in tree.items()}

    return with_layers_apart(jax.tree_util.tree_map_with_path(narrow, variables))


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
    stopped: jax.Array,
    limits: tuple[jax.Array, jax.Array, jax.Array | None],
    *,
    sampling: Sampling,
    search: Beams,
) -> State:
    """The state when so many tokens are chosen as the first limit says, of the second in all, or every text has ended.

    `stopped` [B] are texts that end here; a token sees no more than the third limit of those before it, itself
    included.
    """
    until, length, visible = limits

    def going_on(state: State) -> jax.Array:
        return (state.step < until) & ~state.texts.finished.all()

    def one_token(state: State) -> State:
        step, last, seen, texts, cache = state
        if visible is not None:
            near = jnp.arange(cache.documents.shape[1]) > cache.used - visible
            cache = cache._replace(documents=jnp.where(near, cache.documents, 0))
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

    texts = state.texts._replace(finished=state.texts.finished | stopped)
    return jax.lax.while_loop(going_on, one_token, state._replace(texts=texts))
