"""Linear maps between named axes, with fp32 parameters and compute in the dtype of their input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.parameters import parameter


class Linear(nn.Module):
    """y = x W + b over the last `len(inputs)` axes of x; W [*inputs, *outputs], as (D,) -> (H, C) or (H, C) -> (D,)."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...]
    """Names of the axes of W."""
    kernel_init: Callable[..., jax.Array]
    use_bias: bool = True

    def setup(self) -> None:
        self.kernel = parameter(self, "kernel", self.kernel_init, (*self.inputs, *self.outputs), self.axes)
        if self.use_bias:
            axes = tuple("norm" if axis == "width" else axis for axis in self.axes[len(self.inputs) :])
            self.bias = parameter(self, "bias", nn.initializers.zeros, self.outputs, axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *inputs] -> [..., *outputs]."""
        lead = x.shape[: x.ndim - len(self.inputs)]
        kernel = self.kernel.astype(x.dtype).reshape(math.prod(self.inputs), math.prod(self.outputs))
        y = x.reshape(*lead, math.prod(self.inputs)) @ kernel
        if self.use_bias:  # before the product is reshaped: a GPU's product then adds it itself
            y += self.bias.astype(y.dtype).reshape(-1)
        return y.reshape(*lead, *self.outputs)


def side_by_side(maps: Sequence[Linear], x: jax.Array) -> jax.Array:
    """What maps (D,) -> (H, C) make of x [..., D], in one product: [..., H, maps, C]. So the gradient by x is one
    product, too, not a sum of several; heads stay the outer axis, which may be sharded."""
    kernel = jnp.stack(unfused(*(each.kernel.astype(x.dtype) for each in maps)), axis=2)
    y = x @ kernel.reshape(len(kernel), -1)
    if maps[0].use_bias:
        y += jnp.stack([each.bias.astype(x.dtype) for each in maps], axis=1).reshape(-1)
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


@jax.custom_vjp
def unfused(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, whose gradients are written each for itself. Without, a GPU's compiler puts what takes them out of
    one array into the kernel that collects them of all layers, which took 10 of BERT-large's 87 ms."""
    return arrays


unfused.defvjp(lambda *arrays: (arrays, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def split_key(key: jax.Array | None, count: int) -> tuple[jax.Array | None, ...]:
    """`count` keys, or as many Nones in evaluation."""
    return (None,) * count if key is None else tuple(jax.random.split(key, count))
