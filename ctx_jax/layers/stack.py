"""The one way in which layers are stacked: parameters with a leading layer axis, applied by a scan or a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.parameters import Named, is_named
from ctx_jax.parallel.sharding import constrain


class Stack(nn.Module):
    """`depth` equal layers. A layer (or one period of a mixed pattern) is a module whose call is

        layer(x, per_layer, shared, key) -> (x, outputs)

    with x [B, T, D] (or a tuple of such streams), `per_layer` this layer's slice of what differs between layers (its
    memory), `shared` what does not (masks, positions), key None in evaluation, and `outputs` a pytree (possibly empty)
    of arrays [B, ...].

    `scan` and `remat` change speed and memory only: the parameters, and so the checkpoints, are the same.

    Generation takes the layers one after the other, each with arrays of its own, so that no step copies a slice: the
    parameters may be a list of the layers' (`apart`), and where `per_layer` is one, so are the outputs.
    """

    layer: Callable[..., nn.Module]
    """Makes one layer, unbound: `functools.partial(Layer, config)`."""
    depth: int
    scan: bool = True
    remat: bool = False

    @nn.compact  # the one module that is not `setup`: its parameters' shapes follow from the first inputs
    def __call__(self, x: Any, per_layer: Any, shared: Any, key: jax.Array | None, last: Any = None) -> tuple[Any, Any]:
        """per_layer: pytree of [B, L, ...]; `last` is what the last layer sees in place of `shared`, if anything else.
        Returns x and the layers' outputs, each [B, L, ...]."""
        layer = self.layer(parent=None)
        if isinstance(per_layer, list):
            assert key is None
            outputs = []
            for own, entry in zip(apart(self.get_variable("params", "layers")), per_layer, strict=True):
                x, output = layer.apply({"params": own}, x, entry, shared, None)
                outputs.append(output)
            return x, outputs
        per_layer = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), per_layer)
        first = jax.tree.map(lambda leaf: leaf[0], per_layer)

        def initialize(rng: jax.Array) -> Any:
            keys = jax.random.split(rng, self.depth)
            boxes = jax.vmap(lambda k: layer.init(k, x, first, shared, None)["params"])(keys)
            return jax.tree.map(lambda box: Named(box.value, ("layers", *box.axes)), boxes, is_leaf=is_named)

        if self.has_variable("params", "layers"):
            parameters = nn.meta.unbox(self.get_variable("params", "layers"))
        else:
            parameters = self.param("layers", initialize)
        keys = None if key is None else jax.random.split(key, self.depth)

        def applied(shared: Any) -> Any:
            def apply(x: Any, inputs: Any) -> tuple[Any, Any]:
                parameters, per_layer, key = inputs
                x, outputs = layer.apply({"params": parameters}, x, per_layer, shared, key)
                return jax.tree.map(lambda stream: constrain(stream, ("batch", "length", "activation")), x), outputs

            return jax.checkpoint(apply, prevent_cse=not self.scan) if self.remat else apply

        scanned = 0
        collected = []
        if self.scan and not isinstance(parameters, list):
            scanned = self.depth - (last is not None)
            inputs = jax.tree.map(lambda leaf: leaf[:scanned], (parameters, per_layer, keys))
            x, outputs = jax.lax.scan(applied(shared), x, inputs)
            collected.append(outputs)
        for index, own in enumerate(apart(parameters)):
            if index >= scanned:
                seen = last if last is not None and index == self.depth - 1 else shared
                x, output = applied(seen)(x, (own, *jax.tree.map(lambda leaf, i=index: leaf[i], (per_layer, keys))))
                collected.append(jax.tree.map(lambda leaf: leaf[None], output))
        return x, jax.tree.map(lambda *leaves: joined(leaves, self.depth), *collected)


def joined(pieces: tuple[jax.Array, ...], depth: int) -> jax.Array:
    """Layers' outputs [..., B, ...], of some layers each, to [B, L, ...].

    One after the other, in place: a GPU's concatenation of many takes five times what memory needs.
    """
    if len(pieces) == 1:
        return jnp.moveaxis(pieces[0], 0, 1)
    rows, *rest = pieces[0].shape[1:]
    whole, first = jnp.zeros((rows, depth, *rest), pieces[0].dtype), 0
    for piece in pieces:
        whole = jax.lax.dynamic_update_slice_in_dim(whole, jnp.moveaxis(piece, 0, 1), first, axis=1)
        first += len(piece)
    return whole


def apart(layers: Any) -> list[Any]:
    """What each layer has of parameters that are stacked, or apart already."""
    if isinstance(layers, list):
        return layers
    layers = nn.meta.unbox(layers)
    depth = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda leaf, i=index: leaf[i], layers) for index in range(depth)]
