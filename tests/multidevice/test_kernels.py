"""The kernels over a mesh of eight devices, rows and heads split: what one device computes, dropout on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.kernels import flash, tiles
from ctx_jax.layers.masks import Visibility
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import replicated
from ctx_jax.training.step import on_mesh

B, T, S, H, C = 8, 20, 36, 4, 16


@pytest.mark.parametrize("places", [False, True])
def test_kernels_are_the_same_on_eight_devices(places, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 16)
    ids = jnp.ones((B, S), jnp.int32)
    ranks = jnp.arange(S)[None]
    at = jnp.asarray(np.stack([np.random.default_rng(row).permutation(S)[:T] for row in range(B)]), jnp.int32)
    seen = at if places else jnp.arange(S - T, S)[None]
    visibility = Visibility(ids[:, :T], ids, ranks, jnp.zeros((1, 1), jnp.int32), seen)
    shapes = (B, T, H, C), (B, S, H, C), (B, S, H, C), (2 * S if places else S, H, C), (H, C), (H, C)
    operands = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    weights = jax.random.normal(jax.random.key(9), (B, T, H, C))

    def loss(query, key, value, *ruv):
        position = flash.Position(*ruv, None, at if places else None)
        y = flash.relative_attention(
            query, key, value, position, visibility, None, 0.3, jax.random.key(1), interpret=True
        )
        return (y * weights).sum()

    run = jax.value_and_grad(loss, tuple(range(6)))
    expected = jax.jit(run)(*operands)
    mesh = Mesh(data=2, fsdp=2, tensor=2).build(jax.devices())
    found = jax.jit(on_mesh(mesh, run), in_shardings=replicated(mesh))(*operands)
    expected = jax.device_get(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max() * np.sqrt(np.size(b)))
