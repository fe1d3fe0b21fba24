"""JAX's splash attention, interpreted, as we call it: against plain attention, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.kernels import splash
from ctx_jax.layers.attention import attention

B, T, H, C = 2, 130, 2, 20
DOCUMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, T)), axis=1)[:, ::-1], jnp.int32)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 9)])
def test_splash_attention_is_attention(causal, window):
    qkv = [jax.random.normal(jax.random.key(n), (B, T, H, C)) for n in range(3)]
    weights = jax.random.normal(jax.random.key(3), (B, T, H, C)) * (DOCUMENTS > 0)[..., None, None]

    def gradient(function):
        return jax.jit(jax.value_and_grad(lambda *x: (function(*x) * weights).sum(), (0, 1, 2)))

    ours = gradient(lambda *x: splash.attention(*x, DOCUMENTS, causal=causal, window=window, interpret=True))
    twin = gradient(lambda *x: attention(*x, DOCUMENTS, DOCUMENTS, causal=causal, window=window)[0])
    for a, b in zip(jax.tree.leaves(ours(*qkv)), jax.tree.leaves(twin(*qkv)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_it_lowers_for_a_tpu():
    x = jax.ShapeDtypeStruct((B, T, H, C), jnp.bfloat16)
    call = jax.jit(lambda *qkv: splash.attention(*qkv, DOCUMENTS, causal=True, window=None))
    assert "tpu_custom_call" in call.trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()


def test_obstacles(monkeypatch):
    def query(length: int) -> jax.Array:
        return jnp.zeros((1, length, 1, 8), jnp.bfloat16)

    assert splash.obstacle(query(128), query(128), False) == "no kernel for cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert splash.obstacle(query(128), query(128), False) is None
    assert splash.obstacle(query(128), query(128), True).startswith("dropout")
    assert splash.obstacle(query(128), query(200), False).startswith("128 queries of 200 keys")
