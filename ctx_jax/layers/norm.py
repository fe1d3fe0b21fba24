"""Layer normalisation (Ba et al. 2016, arXiv 1607.06450), computed in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.parameters import parameter


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """x [..., D] normalised over D, equation 4; biased variance; statistics in fp32, result in x's dtype.

    For its gradient only x and the two statistics are kept.
    """
    return _forward(x, scale, bias, epsilon)[0]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> tuple[jax.Array, Any]:
    wide = _wide(x)
    mean = wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + epsilon)
    return ((wide - mean) * inverse * scale + bias).astype(x.dtype), (x, mean, inverse, scale, bias)


def _backward(epsilon: float, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    del epsilon
    x, mean, inverse, scale, bias = kept
    normal, wide = (_wide(x) - mean) * inverse, _wide(gradient)
    scaled = wide * scale
    along = normal * (scaled * normal).mean(-1, keepdims=True)
    by_x = inverse * (scaled - scaled.mean(-1, keepdims=True) - along)
    lead = tuple(range(x.ndim - 1))
    by_scale, by_bias = (wide * normal).sum(lead), wide.sum(lead)
    return by_x.astype(x.dtype), by_scale.astype(scale.dtype), by_bias.astype(bias.dtype)


layer_norm.defvjp(_forward, _backward)


class LayerNorm(nn.Module):
    """Gain and bias of `layer_norm`."""

    width: int
    epsilon: float
    scale_init: Callable[..., jax.Array] = nn.initializers.ones

    def setup(self) -> None:
        self.scale = parameter(self, "scale", self.scale_init, (self.width,), ("norm",))
        self.bias = parameter(self, "bias", nn.initializers.zeros, (self.width,), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return layer_norm(x, self.scale, self.bias, self.epsilon)
