"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax

from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.linear import Linear

Activation = Literal["gelu", "gelu_tanh", "relu"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""GELU by the error function (Hendrycks and Gimpel 2016, section 2), by their tanh approximation, and ReLU."""


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
