"""Layer normalisation (Ba et al. 2016, arXiv 1607.06450), computed in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.kernels import chose
from ctx_jax.kernels import norm as kernel
from ctx_jax.layers.dropout import dropout, stirred, words
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


def add_norm(
    x: jax.Array,
    branch: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    rate: float = 0.0,
    key: jax.Array | None = None,
    both: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x [..., D] plus the dropped out branch [..., D] (None: nothing), and that normalised.

    `both` says whether the caller needs the sum itself; the first result has no gradient otherwise. Without a key there
    is no dropout.
    """
    obstacle = kernel.obstacle(x)
    chose("LayerNorm", "Pallas kernel" if obstacle is None else f"XLA: {obstacle}")
    if obstacle is not None:
        total = x if branch is None else x + dropout(branch, rate, key)
        return total, layer_norm(total, scale, bias, epsilon)
    states = None if branch is None or key is None or rate == 0.0 else stirred(x.shape, *words(key))
    return kernel.add_norm(x, branch, states, scale, bias, epsilon=epsilon, rate=rate, both=both)


class LayerNorm(nn.Module):
    """Gain and bias of `layer_norm`."""

    width: int
    epsilon: float
    scale_init: Callable[..., jax.Array] = nn.initializers.ones

    def setup(self) -> None:
        self.scale = parameter(self, "scale", self.scale_init, (self.width,), ("norm",))
        self.bias = parameter(self, "bias", nn.initializers.zeros, (self.width,), ("norm",))

    def __call__(
        self, x: jax.Array, branch: jax.Array | None = None, rate: float = 0.0, key: jax.Array | None = None
    ) -> jax.Array:
        """[..., D] -> [..., D]: x plus the dropped out branch, normalised (post-LN)."""
        return add_norm(x, branch, self.scale, self.bias, epsilon=self.epsilon, rate=rate, key=key)[1]

    def both(
        self, x: jax.Array, branch: jax.Array | None = None, rate: float = 0.0, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x plus the dropped out branch, where the next residual connection starts, and that normalised (pre-LN)."""
        return add_norm(x, branch, self.scale, self.bias, epsilon=self.epsilon, rate=rate, key=key, both=True)
