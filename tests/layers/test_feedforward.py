from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.dropout import mask, words
from ctx_jax.layers.feedforward import ACTIVATIONS, Activation, FeedForward

REFERENCE = {
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_activations(name: str):
    x = np.linspace(-4, 4, 33)
    with jax.enable_x64(True):
        y = ACTIVATIONS[name](jnp.array(x))
    np.testing.assert_allclose(y, [REFERENCE[name](value) for value in x], atol=1e-12)


@pytest.mark.parametrize("name", REFERENCE)
def test_slopes_of_activations(name: str):
    """Their gradients are written by hand: against central differences."""
    x, h = np.linspace(-4, 4, 32), 1e-5  # not at 0, where ReLU has none
    with jax.enable_x64(True):
        slopes = jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.array(x))
    expected = [(REFERENCE[name](value + h) - REFERENCE[name](value - h)) / (2 * h) for value in x]
    np.testing.assert_allclose(slopes, expected, atol=1e-8)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_far_out_activations_are_their_limits(name: str):
    """In fp32, where exponentials overflow and the tail is all there is of a slope."""
    x = jnp.array([-1e15, -1e4, -30.0, 30.0, 1e4, 1e15])
    slopes = jax.vmap(jax.grad(ACTIVATIONS[name]))
    np.testing.assert_array_equal(ACTIVATIONS[name](x), jnp.maximum(x, 0))
    np.testing.assert_array_equal(slopes(x), x > 0)
    tail = np.linspace(-5, -3, 9)
    with jax.enable_x64(True):
        expected = slopes(jnp.array(tail))
    exact = 1e-4 if name == "gelu_tanh" else 0.2  # 1 - erf(3.5) has one digit left
    np.testing.assert_allclose(slopes(jnp.float32(tail)), expected, rtol=exact)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_network(activation: Activation):
    module = FeedForward(3, 5, activation, nn.initializers.normal(1.0), nn.initializers.normal(0.1), dropout=0.5)
    x = jax.random.normal(jax.random.key(0), (2, 4, 3))
    variables = nn.meta.unbox(module.init(jax.random.key(1), x))
    variables = jax.tree.map(lambda leaf: leaf + 0.1, variables)  # biases too
    weights = variables["params"]
    inner = np.array(x) @ weights["input"]["kernel"] + weights["input"]["bias"]
    inner = np.vectorize(REFERENCE[activation])(inner)
    np.testing.assert_allclose(
        module.apply(variables, x), inner @ weights["output"]["kernel"] + weights["output"]["bias"], atol=1e-5
    )

    # dropout is on the inner activation: each unit is 0 or doubled
    key = jax.random.key(2)
    keep = np.asarray(mask(inner.shape, *words(key), 0.5))
    np.testing.assert_allclose(
        module.apply(variables, x, key),
        (2 * keep * inner) @ weights["output"]["kernel"] + weights["output"]["bias"],
        atol=1e-5,
    )
