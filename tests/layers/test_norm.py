from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.layers.norm import layer_norm


def naive(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Equation 4, for JAX to differentiate."""
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def test_layer_norm_and_its_gradient():
    with jax.enable_x64(True):
        x, scale, bias, weights = (
            jnp.asarray(np.random.default_rng(seed).normal(size=size))
            for seed, size in enumerate([(2, 3, 8), (8,), (8,), (2, 3, 8)])
        )
        ours, theirs = (
            jax.value_and_grad(lambda *p, norm=norm: (norm(*p) * weights).sum(), (0, 1, 2))(x, scale, bias)
            for norm in (lambda *p: layer_norm(*p, 1e-5), naive)
        )
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_in_bfloat16_statistics_are_fp32():
    """A mean of 300 would swallow deviations of 1 if sums were of 8 bits."""
    x = jnp.asarray(300 + np.arange(-8, 8, 2.0), jnp.bfloat16)
    y = layer_norm(x, jnp.ones(8), jnp.zeros(8), 1e-5)
    wide = np.asarray(x, np.float64)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), (wide - wide.mean()) / wide.std(), atol=1e-2)
