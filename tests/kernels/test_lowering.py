"""That the kernels still lower to Triton: they reach behind Pallas's public interface for one operation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ctx_jax.kernels import flash
from ctx_jax.layers.masks import Visibility

TRIED = ("0.10", "0.11")
"""Versions of JAX with which the kernels were tried, the second one on a GPU."""


def test_the_version_of_jax_was_tried():
    assert jax.__version__.startswith(TRIED), "try kernels.gather on a GPU with this version, and name it here"


# Pallas on Triton goes with JAX 0.12; until then it is the only way to these kernels that needs nothing but JAX
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("places", [False, True])
def test_kernels_lower_to_triton(places, monkeypatch):
    if find_spec("jax._src.pallas.triton.gpu_info"):  # from 0.11 on the lowering asks the device
        info = import_module("jax._src.pallas.triton.gpu_info")
        monkeypatch.setattr(info, "get_gpu_info", lambda: SimpleNamespace(compute_capability=90))
    rows, queries, keys, heads, channels = 2, 32, 100, 2, 24

    def shape(*sizes: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    whole = jnp.int32

    def gradient(query, key, value, relative, bias, documents, key_documents, where):
        ranks = jnp.arange(keys)[None]
        visibility = Visibility(documents, key_documents, ranks, ranks[:, :queries] - 9, ranks[:, :queries])
        position = flash.Position(relative, bias, bias, None, where if places else None)

        def loss(*x):
            return flash.relative_attention(*x, position, visibility, None, 0.1, jax.random.key(0)).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    lowered = (
        jax.jit(gradient)
        .trace(
            shape(rows, queries, heads, channels),
            *(shape(rows, keys, heads, channels) for _ in range(2)),
            shape(keys + queries if not places else 2 * keys, heads, channels),
            shape(heads, channels),
            shape(rows, queries, dtype=whole),
            shape(rows, keys, dtype=whole),
            shape(rows, queries, dtype=whole),
        )
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    for kernel in ("forward_kernel", "key_kernel", "position_kernel"):
        assert lowered.count(f'name = "{kernel}"') == 1
