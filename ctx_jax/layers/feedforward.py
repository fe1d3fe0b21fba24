"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.linear import Linear

Activation = Literal["gelu", "gelu_tanh", "relu"]
HALF_ROOT = math.sqrt(0.5)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x P(X <= x) for a normal X (Hendrycks and Gimpel 2016, section 2), computed in fp32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * HALF_ROOT))).astype(x.dtype)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # From x alone, so that nothing else is kept of the widest activation. The other sign keeps the compiler from
    # sharing the error function with the forward pass, and so from keeping that.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    slope = 0.5 * (1.0 - jax.lax.erf(wide * -HALF_ROOT)) + wide * jnp.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    return ((gradient * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by the tanh approximation (the same paper), computed in fp32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * _sigmoid(_inner(wide))).astype(x.dtype)


def _inner(x: jax.Array) -> jax.Array:
    """Twice tanh's argument: (1 + tanh(y)) / 2 is the sigmoid of 2 y."""
    return 2.0 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _sigmoid(x: jax.Array) -> jax.Array:
    """By a reciprocal root, for which a GPU has one instruction: tanh and division take longer than memory does."""
    root = jax.lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def _gelu_tanh_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # the sigmoid and 1 less it, both exact where they are small; again not shared with the forward pass
    inner = _inner(wide)
    small = jnp.exp(-jnp.abs(inner))
    large = jnp.square(jax.lax.rsqrt(1.0 + small))
    small *= large
    share, rest = jnp.where(inner > 0, large, small), jnp.where(inner > 0, small, large)
    inner_slope = 2.0 * math.sqrt(2 / math.pi) * (1.0 + 3 * 0.044715 * wide * wide)
    return ((gradient * (share + wide * share * rest * inner_slope)).astype(x.dtype),)


gelu_tanh.defvjp(lambda x: (gelu_tanh(x), x), _gelu_tanh_backward)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
}
"""GELU by the error function, by its tanh approximation, and ReLU."""


class FeedForward(nn.Module):
    """width -> feed_forward, activation, dropout -> width. The caller drops out and adds what comes out."""

    width: int
    feed_forward: int
    activation: Activation
    kernel_init: Callable[..., jax.Array]
    output_init: Callable[..., jax.Array] | None = None
    """Init of the second kernel; `kernel_init` if None."""
    dropout: float = 0.0
    """Rate after the activation (Transformer-XL, XLNet)."""

    def setup(self) -> None:
        self.input = Linear((self.width,), (self.feed_forward,), ("width", "feed_forward"), self.kernel_init)
        self.output = Linear(
            (self.feed_forward,), (self.width,), ("feed_forward", "width"), self.output_init or self.kernel_init
        )

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[..., D] -> [..., D]; key None = no dropout."""
        return self.output(dropout(ACTIVATIONS[self.activation](self.input(x)), self.dropout, key))
