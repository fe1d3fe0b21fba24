"""Generation with the real models: a cache, padding and batch mates change nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.generation.beams import Beams
from ctx_jax.generation.decode import _ready, generate
from ctx_jax.generation.sampling import Sampling
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig

VOCABULARY = Vocabulary(size=40, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
SIZE: dict[str, Any] = {"vocabulary_size": 40, "width": 16, "layers": 2, "heads": 2, "feed_forward": 32}
CONFIGS = {
    "gpt": GptConfig(**SIZE, max_length=24),
    "transformer_xl": TransformerXLConfig(**SIZE, memory_length=8),
    "xlnet": XLNetConfig(**SIZE, memory_length=8),
}
PROMPTS = [[2], [2, 9, 8, 30], [2, *range(10, 19)], [2, 22]]


def batch_of(tokens: list[int]) -> dict[str, jax.Array]:
    row = jnp.array([tokens])
    return {"tokens": row, "documents": jnp.ones_like(row), "positions": jnp.arange(row.shape[1])[None]}


@cache
def built(name: str, **settings: Any) -> tuple[Any, Any]:
    """A model and random parameters, large enough that its choices are far from ties."""
    model, rng = replace(CONFIGS[name], **settings).build(), np.random.default_rng(0)
    shapes = unboxed(jax.eval_shape(lambda: model.init(jax.random.key(0), batch_of([2, 3]), method="initialize")))

    def value(path: Any, leaf: Any) -> np.ndarray:
        mean, deviation = {"scale": (1.0, 0.0), "kernel": (0.0, 1.0)}.get(path[-1].key, (0.0, 0.1))
        return rng.normal(mean, deviation, leaf.shape).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(value, shapes)


@partial(jax.jit, static_argnames="model")
def next_logits(model: Any, variables: Any, batch: Any, place: jax.Array) -> jax.Array:
    """[V] for what comes at `place`: by XLNet from its query stream there, by others from the token before."""
    output = model.apply(variables, batch)
    hidden = output.hidden[0, place - 1] if output.query is None else output.query[0, 0]
    return model.apply(variables, hidden, method="logits")


def without_cache(name: str, prompt: list[int], length: int) -> list[int]:
    """Greedy, the whole text read anew for every token, and what is filled in behind it not to be seen."""
    text = list(prompt)
    while len(text) < len(prompt) + length:
        batch = batch_of(text + [7] * (24 - len(text)))
        if name == "xlnet":  # the prompt is context, but for its last token; then the order of the text
            batch["ranks"] = jnp.maximum(batch["positions"] - len(prompt) + 2, 0)
            batch["target_positions"] = jnp.array([[len(text)]])
        logits = np.array(next_logits(*built(name), batch, len(text)))
        logits[[0, 2, 4, 5, 6]] = -np.inf
        if logits.argmax() == VOCABULARY.end:
            break
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def rereading(prompt: list[int], length: int, window: int) -> list[int]:
    """Without a cache by GPT, which goes on from the last tokens when its 24 positions are used up."""
    text, start = list(prompt), 0
    for _ in range(length):
        if len(text) - start > 24:
            start = len(text) - window
        seen = text[start:]
        logits = np.array(next_logits(*endless("gpt"), batch_of(seen + [7] * (24 - len(seen))), len(seen)))
        text.append(best(logits))
    return text[len(prompt) :]


def remembering(name: str, prompt: list[int], length: int, window: int) -> list[int]:
    """By segment memory, without a cache: the prompt is a segment, and then each token is one."""
    settings = {"memory_length": window - 1, **({"reuse_length": None} if name == "xlnet" else {})}
    model, variables = endless(name, **settings)
    if name == "xlnet":  # the place after the token is predicted, and not remembered
        one = replace(model.config, reuse_length=1).build()
        more = {"ranks": jnp.array([[0, 1]]), "target_positions": jnp.array([[1]])}
    else:
        one, more = model, {}

    @jax.jit
    def segment(token: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        output = one.apply(variables, {**batch_of([token, 7] if more else [token]), **more}, memory)
        hidden = output.hidden if output.query is None else output.query
        return one.apply(variables, hidden[0, 0], method="logits"), output.memory

    memory = jax.jit(lambda batch: model.apply(variables, batch).memory)(batch_of(prompt[:-1]))
    text = list(prompt)
    for _ in range(length):
        logits, memory = segment(text[-1], memory)
        text.append(best(np.array(logits)))
    return text[len(prompt) :]


def best(logits: np.ndarray) -> int:
    logits[[0, 2, 4, 5, 6]] = -np.inf
    return int(logits.argmax())


def endless(name: str, **settings: Any) -> tuple[Any, Any]:
    """The model with a vector of zeros for the end: some other token is always more probable."""
    model, variables = built(name, **settings)
    rows = 128  # of the token table and of what else has one for each token
    return model, jax.tree.map(lambda x: jnp.array(x).at[3].set(0) if len(x) == rows else x, variables)


def greedy(name: str, prompts: list[list[int]], length: int, **options: Any) -> list[list[int]]:
    sampling = Sampling(temperature=0.0)
    return generate(*built(name), VOCABULARY, prompts, length=length, sampling=sampling, seed=0, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_neither_cache_nor_padding_nor_batch_mates_change_a_text(name: str):
    texts = greedy(name, PROMPTS, 13)
    assert texts == [without_cache(name, prompt, 13) for prompt in PROMPTS]
    assert texts == [greedy(name, [prompt], 13)[0] for prompt in PROMPTS]
    for rows in itertools.permutations(range(4), 3):
        assert greedy(name, [PROMPTS[row] for row in rows], 13) == [texts[row] for row in rows]
    assert len({tuple(text) for text in texts}) >= 3


@pytest.mark.parametrize(("name", "window"), [("gpt", 10), ("gpt", 24), ("transformer_xl", 6), ("xlnet", 6)])
def test_a_window_slides_over_a_text_of_any_length(name: str, window: int):
    prompts = [[2, 9, 8, 30], [2, *range(10, 39)]]
    options: dict[str, Any] = {"length": 45, "sampling": Sampling(temperature=0.0), "seed": 0, "window": window}
    texts = generate(*endless(name), VOCABULARY, prompts, **options)
    naive = rereading if name == "gpt" else partial(remembering, name)
    assert texts == [naive(prompt, 45, window) for prompt in prompts]
    if name == "gpt":  # where each row slides at its own time
        assert texts[:1] == generate(*endless(name), VOCABULARY, prompts[:1], **options)


@pytest.mark.parametrize(
    ("name", "window", "message"),
    [("gpt", 25, "window 25: choose 1 to 24, the model's positions"), ("xlnet", 0, "window 0: choose 1 or more")],
)
def test_a_window_that_cannot_be_is_named(name: str, window: int, message: str):
    with pytest.raises(ValueError, match=message):
        greedy(name, PROMPTS, 4, window=window)


def exhaustive(name: str, prompt: list[int], length: int, vocabulary: Vocabulary, search: Beams) -> list[int]:
    """The best of all texts up to that length, each scored without a cache."""
    model, variables = built(name, vocabulary_size=vocabulary.size, layers=1)
    texts = list(itertools.product([vocabulary.unknown, *range(7, vocabulary.size)], repeat=length))
    rows = jnp.array([[*prompt, *text] for text in texts])
    batch = {"tokens": rows, "documents": jnp.ones_like(rows), "positions": jnp.arange(rows.shape[1])[None]}
    places = jnp.broadcast_to(len(prompt) + jnp.arange(length), (len(texts), length))
    if name == "xlnet":
        batch |= {"ranks": jnp.maximum(batch["positions"] - len(prompt) + 2, 0), "target_positions": places}
        batch["ranks"] = jnp.broadcast_to(batch["ranks"], rows.shape)

    @jax.jit
    def logits() -> jax.Array:
        output = model.apply(variables, batch)
        hidden = output.query
        if hidden is None:
            hidden = jnp.take_along_axis(output.hidden, places[..., None] - 1, axis=1)
        return model.apply(variables, hidden, method="logits")

    totals = np.array(logits(), np.float64)
    totals[..., [0, 2, 4, 5, 6]] = -np.inf
    totals -= np.log(np.exp(totals).sum(-1, keepdims=True))
    best: tuple[float, list[int]] = (-np.inf, [])
    for text, values in zip(texts, totals, strict=True):
        total = 0.0
        for count in range(length + 1):
            ended = total if count == length else total + values[count, vocabulary.end]
            score = ended / ((5 + min(count + 1, length)) / 6) ** search.length_penalty
            best = max(best, (score, list(text[:count])))
            total += values[count, text[count]] if count < length else 0.0
    return best[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_beam_search_with_room_for_all_texts_is_exhaustive(name: str):
    """Four tokens of text and the end: 80 continuations at the last of three steps. By this penalty some texts end."""
    vocabulary, search = replace(VOCABULARY, size=10), Beams(80, 3.0)
    prompts = [[2], [2, 9, 8, 7, 1], [2, 7, 7]]
    options: dict[str, Any] = {"length": 3, "sampling": Sampling(), "seed": 0, "search": search}
    texts = generate(*built(name, vocabulary_size=10, layers=1), vocabulary, prompts, **options)
    assert texts == [exhaustive(name, prompt, 3, vocabulary, search) for prompt in prompts]


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[2]])
def test_gpt_writes_up_to_its_last_position(prompt: list[int]):
    length = 25 - len(prompt)  # the last token is written behind the last position, and never read
    assert greedy("gpt", [prompt], length) == [without_cache("gpt", prompt, length)]
    with pytest.raises(ValueError, match="pass the model's 24 positions"):
        greedy("gpt", [prompt], length + 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reads_each_matrix_in_the_compute_dtype(name: str):
    model = replace(CONFIGS[name], dtype="bfloat16").build()
    _, variables = built(name)
    ready = jax.eval_shape(partial(_ready, model), variables)["params"]
    assert isinstance(ready["stack"]["layers"], list) and len(ready["stack"]["layers"]) == 2
    dtypes = {
        (path[-1].key in ("kernel", "embedding"), leaf.dtype.name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(ready)
    }
    assert dtypes == {(True, "bfloat16"), (False, "float32")}
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (ready, variables)]
    assert sizes[0] == sizes[1]


def test_a_masked_model_cannot_generate():
    model = BertConfig(**SIZE).build()
    with pytest.raises(ValueError, match=r"^Bert cannot generate: "):
        generate(model, {}, VOCABULARY, PROMPTS, length=4, sampling=Sampling(), seed=0)
