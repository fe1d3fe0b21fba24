from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.attention import Past, SelfAttention, attention, masked_softmax
from ctx_jax.layers.dropout import mask, words

B, T, S, H, C = 2, 3, 5, 2, 4
QUERY_DOCUMENTS = np.array([[1, 1, 2], [3, 3, 0]])
KEY_DOCUMENTS = np.array([[7, 1, 1, 1, 2], [0, 3, 3, 3, 0]])


def inputs(dtype: Any = np.float64) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(B, length, H, C)).astype(dtype) for length in (T, S, S))


def naive(query: Any, key: Any, value: Any, causal: bool, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Loops over pairs in float64."""
    y, probabilities = np.zeros((B, T, H, C)), np.zeros((B, H, T, S))
    for b, h, t in np.ndindex(B, H, T):
        place = S - T + t
        allowed = [
            s
            for s in range(S)
            if KEY_DOCUMENTS[b, s] == QUERY_DOCUMENTS[b, t] != 0
            and (not causal or s <= place)
            and (window is None or place - s < window)
        ]
        weights = {s: np.exp(query[b, t, h] @ key[b, s, h] / np.sqrt(C)) for s in allowed}
        for s, weight in weights.items():
            probabilities[b, h, t, s] = weight / sum(weights.values())
            y[b, t, h] += probabilities[b, h, t, s] * value[b, s, h]
    return y, probabilities


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2)])
def test_attention_is_the_loop_over_pairs(causal: bool, window: int | None):
    query, key, value = inputs()
    with jax.enable_x64(True):
        y, probabilities = attention(
            *map(jnp.array, (query, key, value, QUERY_DOCUMENTS, KEY_DOCUMENTS)), causal=causal, window=window
        )
    expected, expected_probabilities = naive(query, key, value, causal, window)
    np.testing.assert_allclose(y, expected, atol=1e-12)
    np.testing.assert_allclose(probabilities, expected_probabilities, atol=1e-12)


def test_a_query_without_keys_gives_0_and_has_no_gradient():
    def last(query: Any, key: Any, value: Any) -> jax.Array:
        return attention(query, key, value, QUERY_DOCUMENTS, KEY_DOCUMENTS)[0][1, 2]  # padding

    arrays = tuple(map(jnp.array, inputs(np.float32)))
    np.testing.assert_array_equal(last(*arrays), 0)
    for gradient in jax.jit(jax.grad(lambda *x: last(*x).sum(), (0, 1, 2)))(*arrays):
        np.testing.assert_array_equal(gradient, 0)


def test_masked_softmax_does_not_see_what_is_masked():
    scores, mask = jnp.array([1.0, jnp.inf, 1.0, jnp.nan]), jnp.array([True, False, True, False])
    np.testing.assert_array_equal(masked_softmax(scores, mask), [0.5, 0, 0.5, 0])
    gradient = jax.grad(lambda s: masked_softmax(s, mask)[0])(jnp.array([1.0, 1e30, 1.0, 2.0]))
    np.testing.assert_allclose(gradient, [0.25, 0, -0.25, 0])


def test_dropout_is_on_the_probabilities():
    query, key, value = inputs(np.float32)
    dropout_key = jax.random.key(3)
    y, probabilities = attention(
        *map(jnp.array, (query, key, value, QUERY_DOCUMENTS, KEY_DOCUMENTS)), rate=0.25, dropout_key=dropout_key
    )
    _, undropped = naive(query, key, value, False, None)
    keep = np.asarray(mask(undropped.shape, *words(dropout_key), 0.25))
    np.testing.assert_allclose(probabilities, undropped, atol=1e-6)  # what is shown is before dropout
    np.testing.assert_allclose(y, np.einsum("bhts,bshc->bthc", keep * undropped / 0.75, value), atol=1e-5)


def test_extend_is_the_last_position_of_the_whole():
    module = SelfAttention(8, 2, nn.initializers.normal(1.0), causal=True, window=3)
    documents = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 2, 2]])
    seen = jnp.array([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]], bool)[:, None, None]

    @jax.jit
    def run() -> tuple[jax.Array, jax.Array, Past, Past]:
        x = jax.random.normal(jax.random.key(0), (2, 5, 8))
        variables = module.init(jax.random.key(1), x, documents)
        whole, _, past = module.apply(variables, x, documents)
        old = jax.tree.map(lambda leaf: jnp.pad(leaf[:, :, :-1], ((0, 0), (0, 0), (0, 2), (0, 0))), past)
        y, new = module.apply(variables, x[:, -1:], old, 4, seen, method="extend")
        return whole[:, -1:], y, past, new

    whole, y, past, new = run()
    np.testing.assert_allclose(y, whole, atol=1e-5)
    assert new.keys.shape == (2, 2, 6, 4)
    for written, complete in zip(new, past, strict=True):
        np.testing.assert_allclose(written[:, :, :5], complete, atol=1e-6)


def test_bfloat16_softmax_is_in_float32():
    query, key, value = (jnp.array(x, jnp.bfloat16) for x in inputs(np.float32))
    y, probabilities = attention(query, key, value, jnp.array(QUERY_DOCUMENTS), jnp.array(KEY_DOCUMENTS))
    assert (y.dtype, probabilities.dtype) == (jnp.bfloat16, jnp.float32)
    expected, _ = naive(*(np.array(x, np.float64) for x in (query, key, value)), causal=False, window=None)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.03)
