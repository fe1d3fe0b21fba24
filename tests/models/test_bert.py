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

from ctx_jax.layers.parameters import axes_of
from ctx_jax.models.bert import BertConfig

TINY = BertConfig(
    vocabulary_size=13, vocabulary_multiple=8, width=8, layers=2, heads=2, feed_forward=12, max_length=6, classes=3
)
QUIET = replace(TINY, dropout=0.0, attention_dropout=0.0)
V = 13


def batch_of(tokens: Any, documents: Any, segments: Any) -> dict[str, jax.Array]:
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return {
        "tokens": tokens,
        "documents": jnp.asarray(documents),
        "positions": positions,
        "segments": jnp.asarray(segments),
    }


BATCH = batch_of(
    [[3, 7, 1, 12, 5, 9], [4, 4, 11, 6, 0, 0]],
    [[1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 0, 0]],
    [[0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]],
)


def variables_of(config: BertConfig = TINY, seed: int = 0) -> Any:
    """Random values everywhere, so that no bias is 0 and no gain 1."""
    shapes = jax.eval_shape(lambda: config.build().init(jax.random.key(0), BATCH, method="initialize"))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.array(rng.normal(0.1, 0.5, x.shape), x.dtype), nn.meta.unbox(shapes))


def random_key(seed: int) -> jax.Array:
    """Of a generator that compiles in half the time."""
    return jax.random.key(seed, impl="rbg")


def naive_norm(x: np.ndarray, p: Any, epsilon: float) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def naive_gelu(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x)


def naive(p: Any, config: BertConfig, batch: Any) -> dict[str, np.ndarray]:
    """BERT by loops over rows, layers, heads and positions, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    batch = jax.tree.map(np.asarray, batch)
    eps, heads, channels = config.epsilon, config.heads, config.width // config.heads
    x = p["tokens"]["embedding"][batch["tokens"]] + p["positions"]["embedding"][batch["positions"]]
    x = naive_norm(x + p["segments"]["embedding"][batch["segments"]], p["embedding_norm"], eps)
    layers, attention = [x], []
    for index in range(config.layers):
        q = jax.tree.map(lambda leaf, i=index: leaf[i], p["stack"]["layers"])
        a = q["attention"]
        context = np.zeros((*x.shape[:2], heads, channels))
        maps = np.zeros((x.shape[0], heads, x.shape[1], x.shape[1]))
        for row, head in np.ndindex(x.shape[0], heads):
            query, key, value = (
                x[row] @ a[n]["kernel"][:, head] + a[n]["bias"][head] for n in ("query", "key", "value")
            )
            for t, document in enumerate(batch["documents"][row]):
                allowed = (batch["documents"][row] == document) & (document != 0)
                if allowed.any():
                    weights = np.where(allowed, np.exp(key @ query[t] / math.sqrt(channels)), 0)
                    maps[row, head, t] = weights / weights.sum()
            context[row, :, head] = maps[row, head] @ value
        y = np.einsum("bthc,hcd->btd", context, a["output"]["kernel"]) + a["output"]["bias"]
        x = naive_norm(x + y, q["attention_norm"], eps)
        f = q["feed_forward"]
        y = naive_gelu(x @ f["input"]["kernel"] + f["input"]["bias"]) @ f["output"]["kernel"] + f["output"]["bias"]
        x = naive_norm(x + y, q["feed_forward_norm"], eps)
        layers.append(x)
        attention.append(maps)
    pooled = np.tanh(x[:, 0] @ p["pooler"]["kernel"] + p["pooler"]["bias"])
    head = naive_norm(naive_gelu(x @ p["head"]["dense"]["kernel"] + p["head"]["dense"]["bias"]), p["head"]["norm"], eps)
    return {
        "hidden": x,
        "pooled": pooled,
        "layers": np.stack(layers, 1),
        "attention": np.stack(attention, 1),
        "logits": (head @ p["tokens"]["embedding"].T + p["head"]["bias"])[..., :V],
        "classes": pooled @ p["classifier"]["kernel"] + p["classifier"]["bias"],
    }


def test_everything_is_the_naive_network_in_float64():
    variables, model = variables_of(), TINY.build()
    expected = naive(variables["params"], TINY, BATCH)

    def run(v: Any) -> dict[str, Any]:
        output = model.apply(v, BATCH, collect=("layers", "attention"))
        logits = model.apply(v, output.hidden, method="logits")
        classes = model.apply(v, output.pooled, method="classify")
        parts = {name: getattr(output, name) for name in ("hidden", "pooled", "layers", "attention")}
        return {**parts, "logits": logits, "classes": classes}

    with jax.enable_x64(True):
        ours = jax.jit(run)(jax.tree.map(lambda x: x.astype(jnp.float64), variables))
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == jnp.float64
        np.testing.assert_allclose(ours[name], value, atol=1e-10, err_msg=name)


def test_score_is_the_log_softmax_of_the_logits():
    variables, model = variables_of(), TINY.build()
    hidden = jax.random.normal(jax.random.key(5), (2, 3, 8))
    targets, weights = jnp.array([[1, 12, 0], [3, 3, 7]]), jnp.array([[1.0, 0.5, 0.0], [2.0, 1.0, 1.0]])
    scores = model.apply(variables, hidden, targets, weights, method="score")
    logits = model.apply(variables, hidden, method="logits")
    nll = -np.take_along_axis(np.array(jax.nn.log_softmax(logits)), np.array(targets)[..., None], -1)[..., 0]
    assert logits.shape == (2, 3, V)
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(scores.total, (nll * weights).sum(), rtol=1e-5)


def test_a_head_at_every_token_is_linear_in_the_hidden_states():
    config = replace(TINY, token_classes=3)
    variables, model = variables_of(config), config.build()
    p = variables["params"]["token_classifier"]
    hidden = model.apply(variables, BATCH).hidden
    given = model.apply(variables, hidden, method="classify_tokens")
    np.testing.assert_allclose(given, hidden @ p["kernel"] + p["bias"], rtol=1e-5, atol=1e-6)
    assert p["kernel"].shape == (8, 3) and given.shape == (*hidden.shape[:2], 3)
    assert model.apply(variables, hidden.astype(jnp.bfloat16), method="classify_tokens").dtype == jnp.float32
    with pytest.raises(ValueError, match="token_classes 0 is not a size"):
        replace(TINY, token_classes=0)


def reach(config: BertConfig, batch: Any) -> np.ndarray:
    """[T, T] bool of row 0: whether output t has a gradient by the token at s. Each position has a token of its own."""
    variables, model = variables_of(config), config.build()
    direction = jax.random.normal(jax.random.key(1), (config.width,))

    def outputs(table: jax.Array) -> jax.Array:
        params = {**variables["params"], "tokens": {"embedding": table}}
        return model.apply({"params": params}, batch).hidden[0] @ direction

    jacobian = jax.jit(jax.jacrev(outputs))(variables["params"]["tokens"]["embedding"])
    return np.array(jnp.abs(jacobian).sum(-1)[:, batch["tokens"][0]] != 0)


def test_attention_stays_inside_a_document_and_off_the_padding():
    documents = np.array([1, 1, 2, 2, 2, 0])
    batch = batch_of([np.arange(6)], documents[None], np.zeros((1, 6), int))
    expected = (documents[:, None] == documents) & (documents != 0)
    np.testing.assert_array_equal(reach(TINY, batch), expected | np.eye(6, dtype=bool))


def loss(config: BertConfig, variables: Any, key: jax.Array | None) -> jax.Array:
    model = config.build()
    output = model.apply(variables, BATCH, key=key)
    weights = (BATCH["documents"] != 0).astype(jnp.float32)
    total = model.apply(variables, output.hidden, BATCH["tokens"], weights, method="score").total
    return total + jnp.square(model.apply(variables, output.pooled, method="classify")).sum()


@partial(jax.jit, static_argnums=0)
def value_and_gradient(config: BertConfig, variables: Any) -> tuple[jax.Array, jax.Array]:
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
    hidden = jax.eval_shape(replace(TINY, dtype="bfloat16").build().apply, small, BATCH).hidden
    assert hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_dropout_only_with_a_key(rate: str):
    variables, model = variables_of(), replace(QUIET, **{rate: 0.5}).build()
    run = jax.jit(lambda key: model.apply(variables, BATCH, key=key).hidden)
    plain, first, second = run(None), run(random_key(0)), run(random_key(1))
    assert jnp.abs(first - plain).max() > 0.01 and jnp.abs(first - second).max() > 0.01
    np.testing.assert_array_equal(run(random_key(0)), first)


def test_initial_values():
    config = replace(TINY, width=64, heads=4, feed_forward=256, vocabulary_size=500)
    init = jax.jit(lambda: nn.meta.unbox(config.build().init(random_key(0), BATCH, method="initialize")))
    params = init()["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            np.testing.assert_array_equal(leaf, float("scale" in name), err_msg=name)
        elif leaf.size > 2000:
            np.testing.assert_allclose(leaf.std(), 0.02 * 0.8796, rtol=0.04, err_msg=name)  # cut at 2 deviations
            assert jnp.abs(leaf).max() <= 0.04
    kernels = params["stack"]["layers"]["attention"]["query"]["kernel"]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0  # layers do not start alike


def test_every_parameter_names_its_axes():
    axes = axes_of(jax.eval_shape(lambda: TINY.build().init(jax.random.key(0), BATCH, method="initialize")))["params"]
    assert axes["stack"]["layers"]["attention"]["query"]["kernel"] == ("layers", "width", "heads", "channels")
    assert axes["head"]["bias"] == ("vocabulary",)


def test_roberta_starts_its_positions_at_row_2():
    shifted = replace(TINY, position_offset=2)
    variables, model = variables_of(shifted), TINY.build()
    plain = jax.tree.map(lambda x: x, variables)
    plain["params"]["positions"]["embedding"] = variables["params"]["positions"]["embedding"][2:]
    assert variables["params"]["positions"]["embedding"].shape == (8, 8)
    np.testing.assert_array_equal(shifted.build().apply(variables, BATCH).hidden, model.apply(plain, BATCH).hidden)


def test_distilbert_has_neither_segments_nor_pooler():
    config = replace(TINY, segments=0, pooler=False, classes=None)
    variables = variables_of(config)
    output = config.build().apply(variables, BATCH)
    assert output.pooled is None and output.memory is None and output.layers is None and output.attention is None
    assert variables["params"].keys() == {"tokens", "positions", "embedding_norm", "stack", "head"}


def test_the_pooler_may_have_a_relu():
    variables = variables_of()
    tanh, relu = (replace(QUIET, pooler_activation=name).build().apply(variables, BATCH) for name in ("tanh", "relu"))
    pooler = variables["params"]["pooler"]
    raw = relu.hidden[:, 0] @ pooler["kernel"] + pooler["bias"]
    assert (raw < 0).any() and (raw > 0).any()
    np.testing.assert_allclose(relu.pooled, np.maximum(raw, 0), atol=1e-6)
    np.testing.assert_allclose(tanh.pooled, np.tanh(raw), atol=1e-6)


def test_absent_segments_are_all_the_first():
    variables, model = variables_of(), TINY.build()
    zeros = {**BATCH, "segments": jnp.zeros_like(BATCH["tokens"])}
    absent = {name: value for name, value in BATCH.items() if name != "segments"}
    np.testing.assert_array_equal(model.apply(variables, absent).hidden, model.apply(variables, zeros).hidden)


def test_a_sequence_longer_than_the_positions_is_named():
    long = batch_of(np.zeros((1, 7), int), np.ones((1, 7), int), np.zeros((1, 7), int))
    message = "sequence of 7 tokens exceeds max_length 6: shorten it or choose max_length 7"
    with pytest.raises(ValueError, match=message):
        TINY.build().apply(variables_of(), long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads 5 does not divide width 768: choose a divisor of 768"),
        ({"layers": 0}, "layers 0 is not a size: choose 1 or more"),
        ({"classes": 0}, "classes 0 is not a size: choose 1 or more"),
        ({"segments": -1}, "segments -1 is negative: choose 0 or more"),
        ({"dropout": 1.0}, "dropout 1.0 is not a rate: choose at least 0 and less than 1"),
        ({"activation": "swish"}, "activation 'swish' is not known: choose one of gelu, gelu_tanh, relu"),
        ({"pooler_activation": "gelu"}, "pooler_activation 'gelu' is not known: choose tanh or relu"),
        ({"dtype": "float16"}, "dtype 'float16' is not known: choose one of float32, bfloat16"),
        ({"pooler": False}, "classes 2 need the pooled vector: choose pooler True or classes None"),
    ],
)
def test_bad_configs_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        BertConfig(**options)
    assert str(error.value) == message
