from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.embeddings import Embedding, in_dtype, padded
from ctx_jax.layers.parameters import axes_of


@pytest.mark.parametrize(
    ("size", "multiple", "rows"),
    [(1, 128, 128), (128, 128, 128), (129, 128, 256), (50257, 128, 50304), (30522, 1, 30522)],
)
def test_padded(size: int, multiple: int, rows: int):
    assert padded(size, multiple) == rows


def test_lookup_and_its_gradient():
    module = Embedding(5, 3, nn.initializers.normal(1.0))
    ids = jnp.array([[4, 0, 4]])
    variables = nn.meta.unbox(module.init(jax.random.key(0), ids))
    table = variables["params"]["embedding"]
    np.testing.assert_array_equal(module.apply(variables, ids), np.array(table)[np.array(ids)])
    gradient = jax.grad(lambda v: module.apply(v, ids).sum())(variables)["params"]["embedding"]
    np.testing.assert_array_equal(gradient, np.array([1, 0, 0, 0, 2])[:, None] * np.ones(3))


def test_an_id_outside_of_the_table_does_not_pass_unseen():
    module = Embedding(5, 3, nn.initializers.normal(1.0))
    variables = module.init(jax.random.key(0), jnp.array([0]))
    assert jnp.isnan(module.apply(variables, jnp.array([4, 5]))).all(-1).tolist() == [False, True]


def test_axes():
    tables = [Embedding(4, 2, nn.initializers.zeros), Embedding(4, 2, nn.initializers.zeros, ("positions", "table"))]
    axes = [axes_of(table.init(jax.random.key(0), jnp.array([0])))["params"]["embedding"] for table in tables]
    assert axes == [("vocabulary", "table"), ("positions", "table")]


def test_compute_dtype_never_narrows_float64():
    with jax.enable_x64(True):
        x = jnp.ones(2, jnp.float64)
        assert in_dtype(x, "float32").dtype == jnp.float64
        assert in_dtype(x, "bfloat16").dtype == jnp.bfloat16
