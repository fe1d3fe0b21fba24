"""Dropout (Srivastava et al. 2014) whose mask is a function of the key and of an element's own place.

So the mask is the same on any number of devices, in any order of computation, and inside a kernel as outside it; and it
is computed again where the backward pass needs it, instead of being kept. A row's number and the key are mixed as in
Wellons's 32-bit finaliser, so is a column's; an element costs one multiplication by an odd number of its row and one
addition (multiply-add-shift: Dietzfelbinger 1996), which a GPU does at once: a fiftieth of the operations of
jax.random's threefry, whose strength dropout does not need.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def mix(x: jax.Array) -> jax.Array:
    """uint32 -> uint32, one to one, every bit depending on every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key's two words, uint32: what `stir` takes."""
    data = jax.random.key_data(key).reshape(-1)
    return data[0], data[-1]


def stir(number: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Numbers of rows, uint32 -> their mixed state under the key of these words."""
    return mix(mix(number + first) ^ second)


def drawn(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A number of each element, evenly any uint32: of stirred rows and mixed columns, uint32, which broadcast."""
    odd = (rows * jnp.uint32(0x85EBCA6B)) | jnp.uint32(1)
    return columns * odd + rows


def least(rate: float) -> int:
    """The smallest number of an element that is kept."""
    return round(rate * 2**32)


def keep(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """True with probability 1 - rate; rows and columns as `drawn` takes them."""
    return drawn(rows, columns) >= jnp.uint32(least(rate))


def stirred(shape: tuple[int, ...], first: jax.Array, second: jax.Array) -> jax.Array:
    """The states of the rows of an array [*rows, columns], [*rows, 1]; a row's number counts all its axes, modulo
    2**32."""
    number = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for axis in range(len(shape) - 1):
        stride = math.prod(shape[axis + 1 : -1]) % 2**32
        number += jax.lax.broadcasted_iota(jnp.uint32, number.shape, axis) * jnp.uint32(stride)
    return stir(number, first, second)


def mask(shape: tuple[int, ...], first: jax.Array, second: jax.Array, rate: float) -> jax.Array:
    """What is kept of an array [*rows, columns]."""
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return keep(stirred(shape, first, second), mix(columns), rate)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _drop(x: jax.Array, first: jax.Array, second: jax.Array, rate: float) -> jax.Array:
    scale = jnp.array(1.0 / (1.0 - rate), jnp.promote_types(x.dtype, jnp.float32))  # bf16 would round it
    return jnp.where(mask(x.shape, first, second, rate), (x * scale).astype(x.dtype), jnp.zeros_like(x))


def _forward(x: jax.Array, first: jax.Array, second: jax.Array, rate: float) -> tuple[jax.Array, Any]:
    return _drop(x, first, second, rate), (first, second)


def _backward(rate: float, key: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return _drop(gradient, *key, rate), None, None


_drop.defvjp(_forward, _backward)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout of x [..., D]; nothing without a key (evaluation)."""
    if key is None or rate == 0.0:
        return x
    return _drop(x, *words(key), rate)
