"""The kernels over a mesh of eight devices, rows and heads split: what one device computes, dropout on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.kernels import flash, losses, norm, tiles
from ctx_jax.layers.attention import visible
from ctx_jax.layers.dropout import stirred, words
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
    shapes = (B, T, H, C), (B, S, H, 2, C), (2 * S if places else S, H, C), (H, C), (H, C)
    operands = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    weights = jax.random.normal(jax.random.key(9), (B, T, H, C))

    def loss(query, packed, *ruv):
        position = flash.Position(*ruv, None, at if places else None)
        y = flash.relative_attention(
            query, packed, None, position, visibility, None, 0.3, jax.random.key(1), interpret=True
        )
        return (y * weights).sum(), y

    agree(jax.grad(loss, tuple(range(5)), has_aux=True), *operands)


def test_packed_attention_is_the_same_on_eight_devices(monkeypatch):
    """The heads that a device has hold their own queries, keys and values."""
    monkeypatch.setattr(tiles, "BLOCK", 16)
    visibility = visible(jnp.ones((B, S), jnp.int32), True, None)
    packed, weights = (jax.random.normal(jax.random.key(n), (B, S, H, *last)) for n, last in enumerate(((3, C), (C,))))

    def loss(packed):
        y = flash.self_attention(packed, visibility, 0.3, jax.random.key(1), interpret=True)
        return (y * weights).sum(), y

    agree(jax.grad(loss, has_aux=True), packed)


def agree(run, *operands):
    """One device and eight compute the same."""
    expected = jax.device_get(jax.jit(run)(*operands))
    mesh = Mesh(data=2, fsdp=2, tensor=2).build(jax.devices())
    found = jax.jit(on_mesh(mesh, run), in_shardings=replicated(mesh))(*operands)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max() * np.sqrt(np.size(b)))


def test_norm_is_the_same_on_eight_devices():
    shapes = (B, T, C), (B, T, C), (C,), (C,)
    operands = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]

    def loss(x, branch, scale, bias):
        states = stirred(x.shape, *words(jax.random.key(1)))
        both = norm.add_norm(x, branch, states, scale, bias, epsilon=1e-3, rate=0.3, both=True, interpret=True)
        return sum(jnp.sin(x + n).sum() for n, x in enumerate(both))

    agree(jax.value_and_grad(loss, (0, 1, 2, 3)), *operands)


def test_cross_entropy_is_the_same_on_eight_devices(monkeypatch):
    monkeypatch.setattr(losses, "WIDTH", 16)
    logits, bias = jax.random.normal(jax.random.key(0), (B, T, 40)), jax.random.normal(jax.random.key(1), (40,))
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, 37)

    def run(logits, bias):
        weights = jnp.ones((B, T))
        return losses.cross_entropy(logits, bias, targets, weights, vocabulary_size=37, interpret=True)

    agree(run, logits, bias)


def test_sizes_are_those_of_a_device():
    mesh = Mesh(data=4, fsdp=2).build(jax.devices())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for obstacle in (norm.obstacle, losses.obstacle):
            x = jax.ShapeDtypeStruct((8, 2**17, 2**12), jnp.bfloat16)  # 2**32 values, 2**29 on each
            assert obstacle(x) == "no kernel for cpu"
            x = jax.ShapeDtypeStruct((8, 2**19, 2**12), jnp.bfloat16)
            assert f"{2**31} " in obstacle(x)
    with jax.sharding.use_abstract_mesh(Mesh(tensor=8).build(jax.devices()).abstract_mesh):
        assert losses.obstacle(x) == "the vocabulary is split over 8 devices"
