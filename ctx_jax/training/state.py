"""What training carries from step to step: one pytree, born sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import ArrayLike

from ctx_jax.contract import Variables
from ctx_jax.layers.parameters import axes_of, unboxed
from ctx_jax.objectives.distillation import TEACHER, Distillation
from ctx_jax.parallel.mesh import AnyMesh
from ctx_jax.parallel.sharding import batch_sharding, like_parameters, parameter_shardings, replicated
from ctx_jax.training.optimizers import Optimizer

INITIALISATION = 0x696E6974
"""Parts the key of the initial parameters from other keys folded from the same seed."""


class TrainState(NamedTuple):
    """Everything that changes in training."""

    step: Any
    """Finished steps, int32."""
    params: Any
    """What the gradient changes."""
    fixed: Any
    """What has no gradient: frozen parameters, static vectors, a teacher, running averages."""
    opt_state: Any
    memory: Any
    """What a segment-recurrent model carries to the next batch, [B, ...]; None without."""


def variables(params: Any, fixed: Any) -> Variables:
    """What `model.apply` takes: trained and fixed parameters in one tree."""
    return {"params": unflatten_dict({**flatten_dict(params), **flatten_dict(fixed)}) if fixed else params}


def abstract_state(model: Any, optimizer: Optimizer, batch: Any, mesh: AnyMesh, fixed: Any = None) -> TrainState:
    """The state as shapes with shardings: nothing is computed or allocated.

    Args:
        batch: a prepared batch, or its shapes.
        fixed: values (or their shapes) of `TrainState.fixed`; parameters at its paths are not trained. What is on the
            mesh already stays where it is; the rest is sharded as the parameters are that it stands for.

    Raises ValueError, naming the tensor, if a parameter does not divide over the mesh.
    """
    fixed = fixed or {}
    shapes = abstract_parameters(model, batch, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    params, params_shardings = without(shapes, fixed), without(shardings, fixed)
    opt_state = jax.eval_shape(optimizer.tx.init, params)
    memory = jax.eval_shape(lambda: model.init_memory(row_count(batch)))

    def with_shardings(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    def placed(leaf: Any, sharding: Any) -> Any:
        own = getattr(leaf, "sharding", None)
        return own if isinstance(own, jax.sharding.NamedSharding) else sharding

    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),
        params=with_shardings(params, params_shardings),
        fixed=with_shardings(fixed, jax.tree.map(placed, fixed, like_parameters(mesh, fixed, shapes, shardings))),
        opt_state=with_shardings(opt_state, like_parameters(mesh, opt_state, params, params_shardings)),
        memory=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), memory),
    )


def abstract_parameters(model: Any, batch: Any, mesh: AnyMesh) -> Any:
    """The parameters as shapes with shardings; arguments and errors as `abstract_state`."""
    boxed = jax.eval_shape(lambda: initial_parameters(model, batch, mesh, 0))
    shapes = unboxed(boxed)
    shardings = parameter_shardings(mesh, shapes, axes_of(boxed))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def abstract_fixed(objective: Any, batch: Any, mesh: AnyMesh) -> Any:
    """`TrainState.fixed` of an objective as shapes with shardings: its teacher's parameters, if it has a teacher."""
    if not isinstance(objective, Distillation):
        return {}
    return {TEACHER: abstract_parameters(objective.teacher.build(), batch, mesh)}


def shardings_of(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(
    model: Any, optimizer: Optimizer, batch: Any, mesh: jax.sharding.Mesh, seed: int, fixed: Any = None
) -> TrainState:
    """A new state: the same values on any mesh, each device making its own part. Arguments as `abstract_state`."""
    fixed = fixed or {}
    shardings = shardings_of(abstract_state(model, optimizer, batch, mesh, fixed))

    def init(seed: ArrayLike) -> TrainState:
        params = without(unboxed(initial_parameters(model, batch, mesh, seed)), fixed)
        memory = model.init_memory(row_count(batch))
        return TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.tx.init(params), memory)

    state = jax.jit(init, out_shardings=shardings._replace(fixed={}))(np.uint32(seed))
    return state._replace(fixed=jax.device_put(fixed, shardings.fixed))


def memory_maker(model: Any, batch_size: int, mesh: jax.sharding.Mesh) -> Callable[[], Any]:
    """A function that makes an empty memory, its rows over the mesh; None for a model without."""
    return jax.jit(lambda: model.init_memory(batch_size), out_shardings=batch_sharding(mesh))


def initial_parameters(model: Any, batch: Any, mesh: AnyMesh, seed: ArrayLike) -> Any:
    """The tree of `Named` parameters; to be traced. Their values do not depend on the batch's."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        key = jax.random.fold_in(jax.random.key(seed), INITIALISATION)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        return model.init(key, zeros, method="initialize")["params"]


def without(tree: Any, fixed: Any) -> Any:
    """The tree's parameters that are not in `fixed`."""
    if not fixed:
        return tree
    taken = flatten_dict(fixed)
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(tree).items() if path not in taken})


def row_count(batch: Any) -> int:
    return cast(int, batch["tokens"].shape[0])
