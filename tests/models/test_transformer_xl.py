"""Transformer-XL against a naive float64 network, and the properties of its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Memory
from ctx_jax.kernels import flash, tiles
from ctx_jax.layers.masks import Visibility
from ctx_jax.models.transformer_xl import TransformerXL, TransformerXLConfig

V = 30
TINY = TransformerXLConfig(
    vocabulary_size=V, vocabulary_multiple=8, width=8, layers=2, heads=2, feed_forward=12, memory_length=3
)
ADAPTIVE = replace(
    TINY, norm="pre", untie_biases=True, cutoffs=(6, 14), embedding_divisor=2, clamp_length=4, same_length=True
)


@partial(jax.jit, static_argnames=("config", "collect"))
def run(
    config: TransformerXLConfig, variables: Any, batch: Any, memory: Any = None, key: Any = None, collect: Any = ()
) -> Any:
    return config.build().apply(variables, batch, memory, key=key, collect=collect)


def batch_of(tokens: Any, documents: Any = None) -> dict[str, jax.Array]:
    tokens = jnp.asarray(tokens)
    return {"tokens": tokens, "documents": jnp.ones_like(tokens) if documents is None else jnp.asarray(documents)}


TEXT = batch_of(np.random.default_rng(0).integers(0, V, (2, 12)))


def window(batch: Any, start: int, end: int) -> Any:
    return {name: x[:, start:end] for name, x in batch.items()}


def variables_of(config: TransformerXLConfig = TINY, dtype: Any = jnp.float32) -> Any:
    """Random values everywhere, so that no bias is 0 and no gain 1."""
    model, one = config.build(), batch_of([[0]])
    template = nn.meta.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), one, method="initialize")))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.1, 0.4, x.shape).astype(dtype), template)


def random_memory(config: TransformerXLConfig, documents: Any) -> Memory:
    documents = np.asarray(documents)
    shape = (len(documents), config.layers, documents.shape[1], config.width)
    return Memory(np.random.default_rng(1).normal(size=shape).astype(np.float32), documents)


def naive_norm(x: np.ndarray, p: Any) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def naive(p: Any, config: TransformerXLConfig, batch: Any, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and the new memory, one row, head and pair at a time; the embedding is the model's own (tested in
    test_adaptive.py)."""
    with jax.enable_x64(True):
        model = config.build().bind({"params": p})
        vectors = np.asarray(model.vocabulary(batch["tokens"])) * math.sqrt(config.width)
    hidden, renewed = [], []
    width, pre = config.width, config.norm == "pre"
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    for row, x in enumerate(vectors):
        documents = [*memory.documents[row], *np.asarray(batch["documents"])[row]]
        inputs = []
        for index in range(config.layers):
            q = jax.tree.map(lambda leaf, i=index: leaf[i], p["stack"]["layers"])
            biases = q["attention"] if config.untie_biases else p
            source = np.concatenate([memory.hidden[row, index], x])
            inputs.append(source)
            source = naive_norm(source, q["attention_norm"]) if pre else source
            past = len(source) - len(x)
            y = np.zeros_like(x)
            for head in range(config.heads):
                w = {name: q["attention"][name]["kernel"][:, head] for name in ("query", "key", "value", "position")}
                u, v = biases["content_bias"][head], biases["position_bias"][head]
                for i in range(past, len(source)):
                    scores = {}
                    for j in range(i + 1):
                        if documents[i] != documents[j] or documents[i] == 0:
                            continue
                        if config.same_length and i - j >= config.memory_length:
                            continue
                        angles = min(i - j, config.clamp_length or 1000) * frequencies
                        r = np.concatenate([np.sin(angles), np.cos(angles)]) @ w["position"]
                        query = source[i] @ w["query"]
                        score = (query + u) @ (source[j] @ w["key"]) + (query + v) @ r
                        scores[j] = np.exp(score / math.sqrt(width / config.heads))
                    for j, score in scores.items():
                        value = score / sum(scores.values()) * (source[j] @ w["value"])
                        y[i - past] += value @ q["attention"]["output"]["kernel"][head]
            x = x + y if pre else naive_norm(x + y, q["attention_norm"])
            z = naive_norm(x, q["feed_forward_norm"]) if pre else x
            f = q["feed_forward"]
            z = (
                np.maximum(z @ f["input"]["kernel"] + f["input"]["bias"], 0) @ f["output"]["kernel"]
                + f["output"]["bias"]
            )
            x = x + z if pre else naive_norm(x + z, q["feed_forward_norm"])
        hidden.append(x)
        renewed.append(np.stack(inputs)[:, -config.memory_length :])
    return np.stack(hidden), np.stack(renewed)


@pytest.mark.parametrize("config", [TINY, ADAPTIVE], ids=["post-LN, shared u and v", "pre-LN, own u and v, limits"])
def test_everything_is_the_naive_network_in_float64(config: TransformerXLConfig):
    """With documents that end inside the memory, and padding; evaluation limits by replacement."""
    variables = variables_of(config, np.float64)
    batch = batch_of(TEXT["tokens"][:, :5], [[1, 1, 2, 2, 2], [4, 4, 4, 0, 0]])
    memory = random_memory(config, [[0, 7, 1, 1], [0, 4, 4, 4]])
    with jax.enable_x64(True):
        output = jax.device_get(run(config, variables, batch, memory))
    expected, renewed = naive(variables["params"], config, batch, memory)
    assert output.hidden.dtype == np.float64
    np.testing.assert_allclose(output.hidden, expected, atol=1e-10)
    np.testing.assert_allclose(output.memory.hidden, renewed, atol=1e-10)
    assert output.memory.documents.tolist() == [[2, 2, 2], [4, 0, 0]]


class Long(TransformerXL):
    """One pass over all windows of 3 at once: a query sees what it would see with a memory."""

    def visibility(self, documents: jax.Array, key_documents: jax.Array, places: jax.Array) -> Visibility:
        lowest = places // 3 * 3 - self.config.memory_length
        return super().visibility(documents, key_documents, places)._replace(lowest=lowest[None])


@pytest.mark.parametrize("length", [2, 5])
def test_windows_with_memory_are_one_long_pass(length: int):
    config = replace(TINY, memory_length=length)
    variables = variables_of(config, np.float64)
    with jax.enable_x64(True):
        memory, hidden = config.build().init_memory(2), []
        for start in range(0, 12, 3):
            output = run(config, variables, window(TEXT, start, start + 3), memory)
            memory, hidden = output.memory, [*hidden, output.hidden]
        long = jax.jit(lambda v: Long(config).apply(v, TEXT).hidden)(variables)
    np.testing.assert_allclose(jnp.concatenate(hidden, axis=1), long, atol=1e-12)


def test_with_same_length_the_window_does_not_matter():
    """A query sees its nearest `memory_length` keys however the text is cut; without, longer windows show more."""
    variables, passes = variables_of(dtype=np.float64), {}
    with jax.enable_x64(True):
        for length, same_length in ((2, True), (6, True), (6, False)):
            config = replace(TINY, memory_length=4, same_length=same_length)
            memory, hidden = config.build().init_memory(2), []
            for start in range(0, 12, length):
                output = run(config, variables, window(TEXT, start, start + length), memory)
                memory, hidden = output.memory, [*hidden, output.hidden]
            passes[length, same_length] = np.concatenate(hidden, axis=1)
    np.testing.assert_allclose(passes[2, True], passes[6, True], atol=1e-12)
    np.testing.assert_allclose(passes[6, False][:, :4], passes[6, True][:, :4], atol=1e-12)
    assert not np.isclose(passes[6, False][:, 4:], passes[6, True][:, 4:], atol=1e-4).all(-1).any()


def test_no_memory_is_an_empty_one():
    variables, batch = variables_of(), window(TEXT, 0, 2)
    without, empty = (jax.device_get(run(TINY, variables, batch, m)) for m in (None, TINY.build().init_memory(2)))
    np.testing.assert_allclose(without.hidden, empty.hidden, atol=1e-6)
    assert without.memory.hidden.shape == empty.memory.hidden.shape == (2, 2, 3, 8)
    assert without.memory.documents.tolist() == empty.memory.documents.tolist() == [[0, 1, 1]] * 2
    none = replace(TINY, memory_length=0).build()
    assert none.init_memory(2) is None
    assert jax.eval_shape(none.apply, variables, batch).memory is None


def test_only_what_is_reused_enters_the_memory():
    """XLNet's windows overlap: the next one starts after the first `reuse_length` positions."""
    config = replace(TINY, reuse_length=2)
    memory = random_memory(TINY, [[0, 1, 1], [1, 1, 2]])
    output = jax.device_get(run(config, variables_of(), window(TEXT, 0, 6), memory, collect=("layers",)))
    np.testing.assert_array_equal(output.memory.hidden[:, :, 0], memory.hidden[:, :, 2])
    np.testing.assert_array_equal(output.memory.hidden[:, :, 1:], output.layers[:, :-1, :2])
    assert output.memory.documents.tolist() == [[1, 1, 1], [2, 1, 1]]
    np.testing.assert_array_equal(output.layers[:, -1], output.hidden)


def test_who_sees_whom_by_gradients():
    """Exactly no gradient by later positions and other documents, nor by their part of the memory."""
    config = replace(TINY, layers=1, heads=1, memory_length=4)
    variables, documents, old = variables_of(config), np.array([1, 1, 2, 2, 2, 0]), np.array([0, 9, 1, 1])
    memory, batch = random_memory(config, old[None]), batch_of([np.arange(6)], documents[None])

    def outputs(table: jax.Array, hidden: jax.Array) -> jax.Array:
        params = variables["params"]
        tables = {**params["vocabulary"]["tables_0"], "embedding": table}
        params = {**params, "vocabulary": {"tables_0": tables}}
        output = config.build().apply({"params": params}, batch, memory._replace(hidden=hidden))
        return output.hidden[0] @ jnp.arange(8.0)

    table = variables["params"]["vocabulary"]["tables_0"]["embedding"]
    by_token, by_memory = jax.jit(jax.jacrev(outputs, (0, 1)))(table, memory.hidden)
    same = (documents[:, None] == documents) & (documents > 0)
    seen = (same & (np.arange(6) <= np.arange(6)[:, None])) | np.eye(6, dtype=bool)
    np.testing.assert_array_equal(np.abs(by_token).sum(-1)[:, :6] != 0, seen)
    remembered = (documents[:, None] == old) & (old > 0)
    np.testing.assert_array_equal(np.abs(by_memory).sum(-1)[:, 0, 0] != 0, remembered)


def test_no_gradient_enters_the_memory():
    """What the second window predicts does not teach how the first one was read."""
    variables, model, first, second = variables_of(), TINY.build(), window(TEXT, 0, 3), window(TEXT, 3, 6)

    def total(reader: Any) -> jax.Array:
        memory = model.apply(reader, first).memory
        return jnp.sin(model.apply(variables, second, memory).hidden).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(variables)
    assert value != jnp.sin(run(TINY, variables, second).hidden).sum()
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_scan_remat_and_loop_are_the_same():
    variables, memory, batch = variables_of(), random_memory(TINY, [[0, 1, 1]] * 2), window(TEXT, 0, 4)

    @partial(jax.jit, static_argnums=0)
    def gradients(config: TransformerXLConfig) -> Any:
        def total(variables: Any) -> Any:
            output = config.build().apply(variables, batch, memory, collect=("attention",))
            return jnp.sin(output.hidden).sum(), (output.hidden, output.memory, output.attention)

        return jax.value_and_grad(total, has_aux=True)(variables)

    expected, actual = (jax.device_get(gradients(c)) for c in (TINY, replace(TINY, scan=False, remat=True)))
    assert expected[0][1][2].shape == (2, 2, 2, 4, 7)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def test_dropout_falls_on_the_output_too_and_follows_its_key():
    config, batch = replace(TINY, dropout=0.5, width=32, layers=1), window(TEXT, 0, 6)
    variables = variables_of(config)
    first, again, other = (run(config, variables, batch, key=jax.random.key(k, impl="rbg")).hidden for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert ((first == 0) != (other == 0)).any()
    assert abs((first == 0).mean() - 0.5) < 4 * math.sqrt(0.25 / first.size)
    assert (run(config, variables, batch).hidden != 0).all()


def test_bfloat16_keeps_its_memory_narrow_and_its_scores_wide():
    config = replace(TINY, dtype="bfloat16")
    variables, batch = variables_of(), window(TEXT, 0, 6)
    memory = config.build().init_memory(2)
    output, exact = run(config, variables, batch, memory), run(TINY, variables, batch, TINY.build().init_memory(2))
    assert output.hidden.dtype == output.memory.hidden.dtype == memory.hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(output.hidden.astype(jnp.float32), exact.hidden, atol=0.1)
    assert config.build().apply(variables, output.hidden, method="logits").dtype == jnp.float32


def test_score_is_that_of_the_logits():
    model, variables = ADAPTIVE.build(), variables_of(ADAPTIVE)
    hidden = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    targets, weights = np.array([[1, 7, 29], [3, 20, 7]]), np.array([[1, 0.5, 0], [2, 1, 1]], np.float32)
    logits = jax.jit(partial(model.apply, method="logits"))(variables, hidden)
    scores = jax.jit(partial(model.apply, method="score"))(variables, hidden, targets, weights)
    nll = -np.take_along_axis(np.asarray(logits), targets[..., None], axis=-1)[..., 0]
    assert logits.shape == (2, 3, V)
    np.testing.assert_allclose(scores.total, (weights * nll).sum(), rtol=1e-5)


@pytest.mark.parametrize("config", [TINY, ADAPTIVE], ids=["plain", "with limits"])
def test_decoding_is_the_full_pass(config: TransformerXLConfig):
    """Token for token, for prompts of different lengths (one of a single token), padded on either side."""
    variables, model = variables_of(config), config.build()
    texts = np.random.default_rng(1).integers(0, V, (3, 8))
    lengths, room = (1, 4, 3), 3  # the last token of a prompt is decoded
    tokens, documents = np.zeros((3, room), int), np.zeros((3, room), int)
    for row, length in enumerate(lengths):
        columns = slice(0, length - 1) if row == 1 else slice(room - length + 1, room)
        tokens[row, columns], documents[row, columns] = texts[row, : length - 1], row + 1

    @jax.jit
    def full(tokens: jax.Array) -> jax.Array:
        return model.apply(variables, model.apply(variables, batch_of(tokens)).hidden, method="logits")

    expected = full(texts)
    cache = jax.jit(lambda b: model.apply(variables, b, room + 5, method="start"))(batch_of(tokens, documents))
    decode = jax.jit(lambda t, c: model.apply(variables, t, c, method="decode"))
    for step in range(5):
        at = np.array(lengths) - 1 + step
        logits, cache = decode(texts[np.arange(3), at][:, None], cache)
        np.testing.assert_allclose(logits, expected[np.arange(3), at], atol=1e-4)


def test_initial_values():
    config = replace(TINY, layers=1, width=64, feed_forward=256, cutoffs=(10,), embedding_divisor=2)
    init = jax.jit(partial(config.build().init, method="initialize"))
    params = nn.meta.unbox(init(jax.random.key(0), batch_of([[0]])))["params"]
    layer, vocabulary = params["stack"]["layers"], params["vocabulary"]
    gains = np.concatenate([np.ravel(layer[name]["scale"]) for name in ("attention_norm", "feed_forward_norm")])
    for values, mean, deviation in (
        (layer["attention"]["query"]["kernel"], 0, 0.02),
        (layer["feed_forward"]["output"]["kernel"], 0, 0.02),
        (vocabulary["tables_0"]["embedding"], 0, 0.02),
        (vocabulary["input_projections_1"]["kernel"], 0, 0.01),
        (params["content_bias"], 0, 0.02),
        (gains, 1, 0.02),
    ):
        assert abs(np.mean(values) - mean) < 4 * deviation / math.sqrt(values.size)
        assert abs(np.std(values) / deviation - 1) < 4 / math.sqrt(2 * values.size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads 3 does not divide width 8: choose a divisor of 8"),
        ({"width": 9, "heads": 3}, "width 9 is odd: sines and cosines need an even one"),
        ({"memory_length": -1}, "memory_length -1 is not a length: choose 0 (no memory) or more"),
        ({"reuse_length": 0}, "reuse_length 0 is not a length: choose 1 or more, or None"),
        ({"clamp_length": 0}, "clamp_length 0 is not a length: choose 1 or more, or None"),
        (
            {"memory_length": 0, "same_length": True},
            "same_length needs keys to see: choose memory_length 1 or more, or same_length False",
        ),
        ({"norm": "no"}, "norm 'no' is not known: choose pre or post"),
        (
            {"cutoffs": (5, 5)},
            "cutoffs (5, 5) do not ascend inside the vocabulary: choose ids from 1 to 29",
        ),
        ({"cutoffs": (30,)}, "cutoffs (30,) do not ascend inside the vocabulary: choose ids from 1 to 29"),
        ({"embedding_divisor": 0}, "embedding_divisor 0 is not a factor: choose 1 or more"),
        (
            {"cutoffs": (5, 9), "embedding_divisor": 3},
            "embedding_divisor 3 leaves no channel to the last of 2 tails: choose a smaller one",
        ),
    ],
)
def test_impossible_configs(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)
    assert str(error.value) == message


@pytest.mark.parametrize("same_length", [False, True])
def test_the_kernel_knows_the_clamp_in_evaluation_alone(monkeypatch, same_length):
    """Interpreted, in blocks of 16 of which most are beyond it; with a key, dropout tells equal distances apart."""
    config = replace(TINY, memory_length=60, clamp_length=10, same_length=same_length, dropout=0.5)
    variables, key = variables_of(config), jax.random.key(3)
    batch = batch_of(np.random.default_rng(0).integers(0, V, (2, 16)))
    memory = random_memory(config, np.ones((2, 60), np.int32))
    apply = partial(config.build().apply, variables, batch, memory)
    expected = [jax.jit(apply)().hidden, jax.jit(apply)(key=key).hidden]
    clamps = []

    def kernel(*operands: Any) -> jax.Array:
        clamps.append(operands[-1])
        return interpreted(*operands, interpret=True)

    interpreted = flash.relative_attention
    monkeypatch.setattr(tiles, "BLOCK", 16)
    monkeypatch.setattr(flash, "obstacle", lambda query, key: None)
    monkeypatch.setattr(flash, "relative_attention", kernel)
    for options, want in zip(({}, {"key": key}), expected, strict=True):
        np.testing.assert_allclose(jax.jit(lambda options=options: apply(**options))().hidden, want, atol=2e-5)
    assert clamps == [10, None]  # the layers are scanned
