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

from ctx_jax.models.gpt import GptConfig

TINY = GptConfig(
    vocabulary_size=13, vocabulary_multiple=8, width=8, layers=2, heads=2, feed_forward=12, max_length=8, band=2
)
QUIET = replace(TINY, dropout=0.0, attention_dropout=0.0)
GPT3 = replace(TINY, layers=4, attention_pattern=("dense", "local"))
V = 13


def batch_of(tokens: Any, documents: Any) -> dict[str, jax.Array]:
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return {"tokens": tokens, "documents": jnp.asarray(documents), "positions": positions}


BATCH = batch_of([[3, 7, 1, 12, 5, 9], [4, 4, 11, 6, 0, 0]], [[1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 0, 0]])


def variables_of(config: GptConfig = TINY, seed: int = 0) -> Any:
    """Random values everywhere, so that no bias is 0 and no gain 1."""
    shapes = jax.eval_shape(lambda: config.build().init(jax.random.key(0), BATCH, method="initialize"))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.array(rng.normal(0.1, 0.5, x.shape), x.dtype), nn.meta.unbox(shapes))


def random_key(seed: int) -> jax.Array:
    """Of a generator that compiles in half the time."""
    return jax.random.key(seed, impl="rbg")


def naive_norm(x: np.ndarray, p: Any, epsilon: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def naive_attention(x: np.ndarray, p: Any, documents: np.ndarray, band: int) -> np.ndarray:
    """One row [T, D]: loops over heads and positions."""
    y = np.tile(p["output"]["bias"], (len(x), 1))
    for head in range(p["query"]["kernel"].shape[1]):
        query, key, value = (
            x @ p[name]["kernel"][:, head] + p[name]["bias"][head] for name in ("query", "key", "value")
        )
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if documents[s] == documents[t] != 0 and t - s < band]
            if seen:
                weights = np.exp(key[seen] @ query[t] / math.sqrt(query.shape[1]))
                y[t] += weights / weights.sum() @ value[seen] @ p["output"]["kernel"][head]
    return y


def naive_feed_forward(x: np.ndarray, p: Any) -> np.ndarray:
    x = x @ p["input"]["kernel"] + p["input"]["bias"]
    x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x @ p["output"]["kernel"] + p["output"]["bias"]


def naive(p: Any, config: GptConfig, batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits in float64."""
    p, batch = jax.tree.map(lambda x: np.asarray(x, np.float64), p), jax.tree.map(np.asarray, batch)
    eps, period = config.epsilon, len(config.attention_pattern)
    x = p["tokens"]["embedding"][batch["tokens"]] + p["positions"]["embedding"][batch["positions"]]
    for row, documents in enumerate(batch["documents"]):
        h = x[row]
        for index in range(config.layers):
            group, member = divmod(index, period)
            q = jax.tree.map(lambda leaf, i=group: leaf[i], p["stack"]["layers"][f"blocks_{member}"])
            band = config.band if config.attention_pattern[member] == "local" else 1000
            if config.norm == "pre":
                h = h + naive_attention(naive_norm(h, q["attention_norm"], eps), q["attention"], documents, band)
                h = h + naive_feed_forward(naive_norm(h, q["feed_forward_norm"], eps), q["feed_forward"])
            else:
                h = naive_norm(h + naive_attention(h, q["attention"], documents, band), q["attention_norm"], eps)
                h = naive_norm(h + naive_feed_forward(h, q["feed_forward"]), q["feed_forward_norm"], eps)
        x[row] = naive_norm(h, p["final_norm"], eps) if config.norm == "pre" else h
    return x, (x @ p["tokens"]["embedding"].T)[..., :V]


@pytest.mark.parametrize("config", [replace(TINY, norm="post"), GPT3], ids=["GPT", "GPT-3"])
def test_everything_is_the_naive_network_in_float64(config: GptConfig):
    variables, model = variables_of(config), config.build()

    def run(v: Any) -> tuple[jax.Array, jax.Array]:
        hidden = model.apply(v, BATCH).hidden
        return hidden, model.apply(v, hidden, method="logits")

    with jax.enable_x64(True):
        hidden, logits = jax.jit(run)(jax.tree.map(lambda x: x.astype(jnp.float64), variables))
    expected, expected_logits = naive(variables["params"], config, BATCH)
    assert hidden.dtype == logits.dtype == jnp.float64
    np.testing.assert_allclose(hidden, expected, atol=1e-10)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-10)


def test_score_is_the_log_softmax_of_the_logits():
    variables, model = variables_of(), TINY.build()
    hidden = jax.random.normal(jax.random.key(5), (2, 3, 8))
    targets, weights = jnp.array([[1, 12, 0], [3, 3, 7]]), jnp.array([[1.0, 0.5, 0.0], [2.0, 1.0, 1.0]])
    scores = model.apply(variables, hidden, targets, weights, method="score")
    logits = model.apply(variables, hidden, method="logits")
    nll = -np.take_along_axis(np.array(jax.nn.log_softmax(logits)), np.array(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(scores.total, (nll * weights).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "span"),
    [(("dense",), 8), (("local",), 2), (("local", "local"), 3)],
    ids=["dense", "local", "two local"],
)
def test_causality_by_gradients(pattern: Any, span: int):
    """Exactly no gradient by later positions, other documents, padding and what lies outside of the band."""
    config = replace(TINY, layers=len(pattern), attention_pattern=pattern)
    documents = np.array([1, 1, 1, 1, 1, 2, 2, 0])
    batch = batch_of([np.arange(8)], documents[None])  # each position has a token of its own
    variables, model = variables_of(config), config.build()
    direction = jax.random.normal(jax.random.key(1), (config.width,))

    def outputs(table: jax.Array) -> jax.Array:
        params = {**variables["params"], "tokens": {"embedding": table}}
        return model.apply({"params": params}, batch).hidden[0] @ direction

    jacobian = jax.jit(jax.jacrev(outputs))(variables["params"]["tokens"]["embedding"])
    distance = np.subtract.outer(np.arange(8), np.arange(8))
    same = (documents[:, None] == documents) & (documents != 0)
    expected = (same & (distance >= 0) & (distance < span)) | np.eye(8, dtype=bool)
    np.testing.assert_array_equal(jnp.abs(jacobian).sum(-1)[:, :8] != 0, expected)


@pytest.mark.parametrize("config", [replace(TINY, norm="post"), GPT3], ids=["GPT", "GPT-3"])
def test_cached_decoding_is_the_full_forward_pass(config: GptConfig):
    """Token for token, for prompts of different lengths, padded on either side; the last one has two documents."""
    variables, model = variables_of(config), config.build()
    texts = jnp.array(np.random.default_rng(1).integers(0, V, (4, 8)))
    documents = jnp.array([[3] * 8, [5] * 8, [1] * 8, [1] * 2 + [2] * 6])
    empty, left, right = (0, 0, 0), (0, 5, 5), (1, 1, 0)
    prompts = {
        "tokens": jnp.stack([texts[0, :3], jnp.roll(texts[1, :3], 1), texts[2, :3], texts[3, :3]]),
        "documents": jnp.array([empty, left, right, (1, 1, 2)]),
    }
    read = np.array([0, 2, 2, 3])  # tokens of each prompt but its last, which the first decode reads

    @jax.jit
    def full() -> jax.Array:
        hidden = model.apply(variables, batch_of(texts, documents)).hidden
        return model.apply(variables, hidden, method="logits")

    decode = jax.jit(lambda tokens, cache: model.apply(variables, tokens, cache, method="decode"))
    cache = jax.jit(lambda: model.apply(variables, prompts, 7, method="start"))()
    expected, rows = full(), np.arange(4)
    for step in range(4):
        logits, cache = decode(texts[rows, read + step][:, None], cache)
        assert logits.shape == (4, V)
        np.testing.assert_allclose(logits, expected[rows, read + step], rtol=1e-4, atol=1e-4)
    assert cache.used == 7
    assert cache.documents.tolist() == [
        [0, 0, 0, 1, 1, 1, 1],
        [0, 5, 5, 5, 5, 5, 5],
        [1, 1, 0, 1, 1, 1, 1],
        [1, 1] + [2] * 5,
    ]


def test_prompts_of_one_token_have_nothing_to_read():
    variables, model = variables_of(), TINY.build()
    empty = {"tokens": jnp.zeros((1, 0), int), "documents": jnp.zeros((1, 0), int)}

    @jax.jit
    def run() -> tuple[jax.Array, jax.Array]:
        logits, _ = model.apply(
            variables, jnp.array([[5]]), model.apply(variables, empty, 2, method="start"), method="decode"
        )
        hidden = model.apply(variables, batch_of([[5]], [[1]])).hidden[:, 0]
        return logits, model.apply(variables, hidden, method="logits")

    logits, expected = run()
    np.testing.assert_allclose(logits, expected, rtol=1e-5)


def loss(config: GptConfig, variables: Any, key: jax.Array | None) -> jax.Array:
    model, weights = config.build(), (BATCH["documents"] != 0).astype(jnp.float32)
    hidden = model.apply(variables, BATCH, key=key).hidden
    return model.apply(variables, hidden, BATCH["tokens"], weights, method="score").total


@partial(jax.jit, static_argnums=0)
def value_and_gradient(config: GptConfig, variables: Any) -> tuple[jax.Array, jax.Array]:
    """The loss with dropout, and its gradient by all parameters in one vector."""
    value, gradient = jax.value_and_grad(lambda v: loss(config, v, random_key(7)))(variables)
    return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])


@pytest.fixture(scope="module")
def small() -> Any:
    return jax.tree.map(lambda x: 0.3 * x, variables_of())


@pytest.fixture(scope="module")
def reference(small: Any) -> tuple[jax.Array, jax.Array]:
    return value_and_gradient(TINY, small)


def test_loop_and_remat_change_nothing(small: Any, reference: Any):
    value, gradient = value_and_gradient(replace(TINY, scan=False, remat=True), small)
    np.testing.assert_allclose(value, reference[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, reference[1], atol=1e-6 * jnp.abs(reference[1]).max())


def test_bfloat16_is_close_to_float32(small: Any, reference: Any):
    value, gradient = value_and_gradient(replace(TINY, dtype="bfloat16"), small)
    assert value.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(value, reference[0], rtol=0.01)
    assert jnp.linalg.norm(gradient - reference[1]) < 0.03 * jnp.linalg.norm(reference[1])


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_dropout_only_with_a_key(rate: str):
    variables, model = variables_of(), replace(QUIET, **{rate: 0.5}).build()
    run = jax.jit(lambda key: model.apply(variables, BATCH, key=key).hidden)
    plain, first, second = run(None), run(random_key(0)), run(random_key(1))
    assert jnp.abs(first - plain).max() > 0.01 and jnp.abs(first - second).max() > 0.01


def test_collected_layers_and_attention():
    variables, model = variables_of(GPT3), GPT3.build()
    output = jax.jit(lambda: model.apply(variables, BATCH, collect=("layers", "attention")))()
    assert output.layers.shape == (2, 5, 6, 8) and output.attention.shape == (2, 4, 2, 6, 6)
    p = variables["params"]
    embedding = p["tokens"]["embedding"][BATCH["tokens"]] + p["positions"]["embedding"][BATCH["positions"]]
    np.testing.assert_allclose(output.layers[:, 0], embedding, rtol=1e-6)
    final = naive_norm(np.array(output.layers[:, -1]), p["final_norm"], GPT3.epsilon)
    np.testing.assert_allclose(output.hidden, final, atol=1e-4)
    np.testing.assert_allclose(output.attention[0].sum(-1), 1, rtol=1e-5)
    seen = (output.attention[0, :, 0] > 0).sum(-1)  # keys of each query in two documents of 3
    np.testing.assert_array_equal(seen, [[1, 2, 3, 1, 2, 3], [1, 2, 2, 1, 2, 2]] * 2)


def test_bfloat16_is_the_dtype_of_the_cache_but_not_of_the_logits():
    model = replace(TINY, dtype="bfloat16").build()
    hidden = jax.eval_shape(model.apply, variables_of(), BATCH).hidden
    cache = jax.eval_shape(lambda: model.apply(variables_of(), BATCH, 7, method="start"))
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    logits, grown = jax.eval_shape(partial(model.apply, method="decode"), variables_of(), tokens, cache)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.past)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), cache, grown))


def test_initial_values():
    config = replace(TINY, width=64, layers=8, heads=4, feed_forward=256, vocabulary_size=500, max_length=64)

    def deviations(config: GptConfig) -> dict[str, float]:
        init = jax.jit(lambda: nn.meta.unbox(config.build().init(random_key(0), BATCH, method="initialize")))
        paths = jax.tree_util.tree_leaves_with_path(init()["params"])
        return {jax.tree_util.keystr(path, simple=True, separator="/"): float(leaf.std()) for path, leaf in paths}

    expected = {"tokens/embedding": 0.02, "positions/embedding": 0.01}
    block = "stack/layers/blocks_0/"
    names = ("attention/query", "attention/key", "attention/value", "feed_forward/input")
    expected |= {f"{block}{name}/kernel": 0.02 for name in names}
    residual = {f"{block}{name}/output/kernel": 0.02 for name in ("attention", "feed_forward")}
    scaled, plain = deviations(config), deviations(replace(config, residual_scaling=False))
    for name, value in (expected | residual).items():
        np.testing.assert_allclose(plain[name], value, rtol=0.04, err_msg=name)
        np.testing.assert_allclose(scaled[name], value / 4 if name in residual else value, rtol=0.04, err_msg=name)


def test_too_long_sequences_are_named():
    variables, model = variables_of(), TINY.build()
    message = "sequence of 9 tokens exceeds max_length 8: shorten it or choose max_length 9"
    with pytest.raises(ValueError, match=message):
        model.apply(variables, batch_of(np.zeros((1, 9), int), np.ones((1, 9), int)))
    with pytest.raises(ValueError, match=message):
        model.apply(variables, BATCH, 9, method="start")
    with pytest.raises(ValueError, match="length 5 is shorter than the prompts: choose 6 or more"):
        model.apply(variables, BATCH, 5, method="start")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 7}, "heads 7 does not divide width 768: choose a divisor of 768"),
        ({"band": 0}, "band 0 is not a size: choose 1 or more"),
        ({"norm": "mid"}, "norm 'mid' is not known: choose pre or post"),
        (
            {"attention_pattern": ("dense", "sparse")},
            "attention_pattern ('dense', 'sparse') is not known: choose from dense and local",
        ),
        (
            {"attention_pattern": ("dense", "local"), "layers": 3},
            "attention_pattern of 2 does not divide layers 3: choose layers in multiples of 2",
        ),
    ],
)
def test_bad_configs_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        GptConfig(**options)
    assert str(error.value) == message


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_last_token_that_is_no_padding_is_pooled(norm: Any):
    """Wherever a row is padded; a row that is all padding gives its first position."""
    config = replace(TINY, norm=norm, classes=3)
    variables, model = variables_of(config), config.build()
    documents = np.array([[1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 0, 0], [0, 0, 1, 1, 1, 0], [0] * 6])
    batch = batch_of(np.tile([3, 7, 1, 12, 5, 9], (4, 1)), documents)
    output = model.apply(variables, batch)
    expected = np.stack([output.hidden[row, place] for row, place in enumerate((5, 3, 4, 0))])
    np.testing.assert_array_equal(output.pooled, expected)
    classes = model.apply(variables, output.pooled.astype(jnp.bfloat16), method="classify")
    kernel = variables["params"]["classifier"]["kernel"]
    assert variables["params"]["classifier"].keys() == {"kernel"} and classes.dtype == jnp.float32
    np.testing.assert_allclose(classes, expected @ kernel, rtol=0.05, atol=0.05)
    assert TINY.build().apply(variables_of(), batch).pooled is None


def test_a_head_at_every_token_is_linear_in_the_hidden_states():
    config = replace(TINY, token_classes=3)
    variables, model = variables_of(config), config.build()
    hidden = model.apply(variables, BATCH).hidden
    p = variables["params"]["token_classifier"]
    given = model.apply(variables, hidden, method="classify_tokens")
    np.testing.assert_allclose(given, hidden @ p["kernel"] + p["bias"], rtol=1e-5, atol=1e-6)
    assert given.shape == (2, 6, 3) and given.dtype == jnp.float32
