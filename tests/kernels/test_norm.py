"""The kernel of residual connection, dropout and LayerNorm, interpreted, against its twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.kernels import norm as kernel
from ctx_jax.layers import norm
from ctx_jax.layers.dropout import dropout, stirred, words

KEY = jax.random.key(3)
EPSILON = 1e-3


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("shape", [(2, 37, 20), (4, 16, 32), (3, 5)])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("branch", [False, True])
def test_values_and_gradients(shape, rate, both, branch):
    """Rows that fill no program, widths that are no power of two, sums that are used and that are not."""
    operands = [normal(0, *shape), normal(1, *shape), normal(2, shape[-1]), normal(4, shape[-1])]
    weights = normal(5, *shape), normal(6, *shape)

    def ours(x, y, scale, bias):
        states = stirred(shape, *words(KEY))
        y = y if branch else None
        return kernel.add_norm(x, y, states, scale, bias, epsilon=EPSILON, rate=rate, both=both, interpret=True)

    def twin(x, y, scale, bias):
        return norm.add_norm(x, y if branch else None, scale, bias, epsilon=EPSILON, rate=rate, key=KEY, both=both)

    def both_of(function):
        def total(*operands):
            outputs = function(*operands)
            return sum((w * x).sum() for w, x in list(zip(weights, outputs, strict=True))[not both :])

        return jax.jit(lambda *x: (function(*x), jax.grad(total, range(4))(*x)))

    (values, gradients), (expected, wanted) = both_of(ours)(*operands), both_of(twin)(*operands)
    for x, y in zip(values, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    for x, y in zip(gradients, wanted, strict=True):
        assert branch or not np.any(wanted[1])
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_bf16_is_rounded_once():
    x, y = (normal(seed, 3, 9, 24).astype(jnp.bfloat16) for seed in (0, 1))
    scale, bias, states = normal(2, 24), normal(4, 24), stirred(x.shape, *words(KEY))
    total, out = kernel.add_norm(x, y, states, scale, bias, epsilon=EPSILON, rate=0.1, both=True, interpret=True)
    exact = (x.astype(jnp.float32) + dropout(y.astype(jnp.float32), 0.1, KEY)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(total, exact)
    wanted = norm.layer_norm(exact.astype(jnp.float32), scale, bias, EPSILON).astype(jnp.bfloat16)
    np.testing.assert_array_max_ulp(out.astype(jnp.float32), wanted.astype(jnp.float32), 2**16)  # one of bf16
