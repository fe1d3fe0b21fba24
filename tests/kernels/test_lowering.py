"""That the kernels still lower to Triton, which JAX means to drop."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ctx_jax.contract import Penalties
from ctx_jax.kernels import flash, losses, norm
from ctx_jax.layers.masks import Visibility

TRIED = ("0.10", "0.11")
"""Versions of JAX with which the kernels were tried, the second one on a GPU."""


def test_the_version_of_jax_was_tried():
    assert jax.__version__.startswith(TRIED), "try the kernels on a GPU with this version, and name it here"


@pytest.fixture(autouse=True)
def some_gpu(monkeypatch):
    if find_spec("jax._src.pallas.triton.gpu_info"):  # from 0.11 on the lowering asks the device
        info = import_module("jax._src.pallas.triton.gpu_info")
        monkeypatch.setattr(info, "get_gpu_info", lambda: SimpleNamespace(compute_capability=90))


def shape(*sizes: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(function, *operands) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


# Pallas on Triton goes with JAX 0.12; until then it is the only way to these kernels that needs nothing but JAX
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("places", [False, True])
def test_attention_lowers_to_triton(places):
    rows, queries, keys, heads, channels = 2, 32, 100, 2, 24

    whole = jnp.int32

    def gradient(query, packed, relative, bias, documents, key_documents, where):
        ranks = jnp.arange(keys)[None]
        visibility = Visibility(documents, key_documents, ranks, ranks[:, :queries] - 9, ranks[:, :queries])
        position = flash.Position(relative, bias, bias, None, where if places else None)

        def loss(*x):
            return flash.relative_attention(*x, None, position, visibility, None, 0.1, jax.random.key(0)).sum()

        return jax.grad(loss, (0, 1))(query, packed)

    text = lowered(
        gradient,
        shape(rows, queries, heads, channels),
        shape(rows, keys, heads, 2, channels),
        shape(keys + queries if not places else 2 * keys, heads, channels),
        shape(heads, channels),
        shape(rows, queries, dtype=whole),
        shape(rows, keys, dtype=whole),
        shape(rows, queries, dtype=whole),
    )
    for kernel in ("scores_kernel", "forward_kernel", "key_kernel", "position_kernel", "relative_kernel"):
        assert text.count(f'name = "{kernel}"') == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_evaluation_beyond_the_clamp_lowers_to_triton():
    def forward(query, packed, relative, bias, documents, key_documents):
        ranks = jnp.arange(260)[None]
        visibility = Visibility(documents, key_documents, ranks, ranks[:, 160:] - 150, ranks[:, 160:])
        position = flash.Position(relative, bias, bias, None, None)
        return flash.relative_attention(query, packed, None, position, visibility, None, 0.0, None, 30)

    operands = shape(2, 100, 2, 24), shape(2, 260, 2, 2, 24), shape(260, 2, 24), shape(2, 24)
    text = lowered(forward, *operands, shape(2, 100, dtype=jnp.int32), shape(2, 260, dtype=jnp.int32))
    for kernel in ("scores_kernel", "forward_kernel"):
        assert text.count(f'name = "{kernel}"') == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_plain_attention_lowers_to_triton():
    def gradient(packed, documents):
        ranks = jnp.arange(documents.shape[1])[None]
        visibility = Visibility(documents, documents, ranks, ranks * 0, ranks)
        return jax.grad(lambda x: flash.self_attention(x, visibility, 0.1, jax.random.key(0)).sum())(packed)

    text = lowered(gradient, shape(2, 100, 2, 3, 24), shape(2, 100, dtype=jnp.int32))
    assert "output_operand_alias" in text  # the queries' gradient is written beside the others
    for kernel in ("forward_kernel", "key_kernel", "query_kernel"):
        assert text.count(f'name = "{kernel}"') == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_norm_lowers_to_triton():
    def gradient(x, branch, states, scale, bias):
        def loss(*operands):
            total, out = norm.add_norm(*operands[:2], states, *operands[2:], epsilon=1e-6, rate=0.1, both=True)
            return (total + out).sum()

        return jax.grad(loss, (0, 1, 2, 3))(x, branch, scale, bias)

    x, vector = shape(3, 7, 48), shape(48, dtype=jnp.float32)
    text = lowered(gradient, x, x, shape(3, 7, 1, dtype=jnp.uint32), vector, vector)
    for kernel in ("norm_forward_kernel", "norm_backward_kernel"):
        assert text.count(f'name = "{kernel}"') == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_cross_entropy_lowers_to_triton():
    text = lowered(
        partial(losses.cross_entropy, penalties=Penalties(0.1, 0.01), vocabulary_size=5000),
        shape(3, 5120),
        shape(5120, dtype=jnp.float32),
        shape(3, dtype=jnp.int32),
        shape(3, dtype=jnp.float32),
    )
    assert text.count('name = "cross_entropy_kernel"') == 1
