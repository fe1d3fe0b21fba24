"""Layer normalisation (Ba et al. 2016, arXiv 1607.06450), computed in fp32."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.parameters import parameter


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """x [..., D] normalised over D, equation 4; biased variance; statistics in fp32, result in x's dtype."""
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + epsilon) * scale + bias).astype(x.dtype)


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
