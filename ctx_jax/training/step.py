"""One training step and one evaluation step, each compiled once.

    batch -> prepare -> counts of the whole batch -> micro-batches: gradient of sum_t total_t / count_t -> update

Because every total is divided by the count of the whole batch before it is differentiated, accumulation, padding and
sharding leave the gradient as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ctx_jax.contract import Batch, Reader, TokenStore, Vocabulary
from ctx_jax.objectives import row_keys
from ctx_jax.parallel.sharding import RULES, batch_sharding, replicated
from ctx_jax.training.optimizers import Optimizer
from ctx_jax.training.state import TrainState, variables

DROPOUT = 0x64726F70
"""Parts the keys of dropout from other keys folded from the same seed."""
GPU = {
    "xla_gpu_enable_command_buffer": "FUSION",
    "xla_gpu_graph_min_graph_size": 20,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_enable_triton_gemm": False,
}
"""A step begins with 100 to 200 small kernels (masks, slices of parameters), each of which is done before the next is
launched: twenty and more in a row go as one graph, all others one by one. A graph of the whole step would have to be
brought up to date before each while the device waits (3 to 5 ms a step of 30 to 70, seen on an H100), and what is
launched one by one is hidden behind what runs.
Products of one operand are not joined: the other operands would be copied beside each other first. All products go to
cuBLASLt, which adds biases and residual gradients itself; of the compiler's own kernels none was ever chosen."""
EVALUATION_SEED = 0
"""Seed of the corruption in evaluation."""


def prepare(objective: Any, batch: Batch, vocabulary: Vocabulary, seed: ArrayLike | None) -> Batch:
    """The prepared batch. Its corruption depends on the seed, the example and the epoch; seed None is evaluation, where
    it depends on the example alone: every evaluation of every run predicts the same targets."""
    epoch = 0 if seed is None else batch["epoch"]
    keys = row_keys(EVALUATION_SEED if seed is None else seed, epoch, batch["example"], objective.copies)
    return objective.prepare(batch, keys, vocabulary)


def prepared_shapes(objective: Any, reader: Reader, store: TokenStore, batch_size: int) -> Batch:
    """Shapes of a prepared batch, from one row of the text. Raises ValueError if there is too little of it, or if the
    reader does not give what the objective needs."""
    row = reader.batch(store, 0, [0], batch_size=batch_size, seed=0)
    batch = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in row.items()}
    if wants_counts(objective, store):
        batch["counts"] = jax.ShapeDtypeStruct(batch["tokens"].shape, jnp.float32)
    return jax.eval_shape(partial(prepare, objective, vocabulary=store.vocabulary, seed=0), batch)


def wants_counts(objective: Any, store: Any) -> bool:
    """Whether the batch needs `counts` to be prepared. Raises ValueError if the store has none."""
    rarity = getattr(objective, "rarity", 0.0)
    if rarity and not hasattr(store, "counts"):
        raise ValueError(
            f"objective.rarity {rarity} needs the tokens of a plain text: choose a corpus of texts, or rarity 0"
        )
    return rarity > 0


def loader_transform(objective: Any, store: TokenStore, seed: int | None) -> Callable[[Batch], Batch] | None:
    """`prepare` for the loader's thread, numpy to numpy on the host's CPU; None if it belongs into the step."""
    if not objective.in_loader:
        return None
    compiled = jax.jit(partial(prepare, objective, vocabulary=store.vocabulary))
    number = None if seed is None else np.uint32(seed)  # an argument, so that seeds share the program
    counts = store.counts().astype(np.float32) if wants_counts(objective, store) else None

    def transform(batch: Batch) -> Batch:
        if counts is not None:
            batch = {**batch, "counts": counts[batch["tokens"]]}
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, compiled(batch, seed=number))

    return transform


def make_train_step(
    model: Any,
    objective: Any,
    optimizer: Optimizer,
    vocabulary: Vocabulary,
    shardings: TrainState,
    *,
    seed: int,
    accumulation: int = 1,
) -> partial[tuple[TrainState, dict[str, Any]]]:
    """(state, batch) -> (state, metrics); `jax.jit` with shardings, which is what pjit was. The old state is donated.
    The seed is the program's first argument, already given: one compiled program is every seed's.

    Row b of the batch goes to micro-batch b mod `accumulation`: each device splits its own rows, nothing moves.
    A batch may carry `update_scale` [B] (the same number in each row), by which the update is multiplied.

    Args:
        shardings: of the state (`state.shardings_of`).

    Metrics, from the parameters before the update: "loss" (sum of the terms), "terms" {name: mean}, "metrics" {name:
    (sum, count)}, "grad_norm" (before clipping), "learning_rate", "tokens" (positions that are no padding).
    """
    mesh = shardings.step.mesh

    def split(x: jax.Array) -> jax.Array:
        """[B, ...] -> [A, B / A, ...]."""
        x = x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(None, RULES["batch"]))

    def join(x: jax.Array) -> jax.Array:
        """[A, B / A, ...] -> [B, ...]."""
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def train_step(seed: jax.Array, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        if not objective.in_loader:
            batch = prepare(objective, batch, vocabulary, seed)
        counts = {term: jnp.maximum(count, 1) for term, count in objective.weights(batch).items()}
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), state.step)

        def loss(params: Any, fixed: Any, batch: Batch, memory: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            output = objective.loss(model, variables(params, fixed), batch, memory, key)
            if output.totals.keys() != counts.keys():
                raise ValueError(
                    f"objective {type(objective).__name__}: loss has the terms {sorted(output.totals)}, weights "
                    f"{sorted(counts)}: both must have the same"
                )
            terms = {term: total / counts[term] for term, total in output.totals.items()}
            memory = memory if output.memory is None else output.memory
            fixed = fixed if output.fixed is None else output.fixed
            return jnp.sum(jnp.stack(list(terms.values()))), (fixed, (memory, terms, output.metrics))

        def accumulate(carry: Any, micro: Any) -> tuple[Any, Any]:
            gradients, fixed = carry
            (_, (fixed, outputs)), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, fixed, *micro)
            return (jax.tree.map(jnp.add, gradients, gradient), fixed), outputs

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        micro_batches = (*jax.tree.map(split, (batch, state.memory)), jax.random.split(key, accumulation))
        (gradients, fixed), (memory, terms, sums) = jax.lax.scan(accumulate, (zeros, state.fixed), micro_batches)
        terms, sums = jax.tree.map(lambda x: x.sum(0), (terms, sums))

        updates, opt_state = optimizer.tx.update(gradients, state.opt_state, state.params)
        if "update_scale" in batch:
            scale = batch["update_scale"].max()
            updates = jax.tree.map(lambda update: update * scale, updates)
        metrics = {
            "loss": sum(terms.values()),
            "terms": terms,
            "metrics": sums,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": jnp.asarray(optimizer.learning_rate(state.step)),
            "tokens": (batch["documents"] > 0).sum(),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, fixed, opt_state, jax.tree.map(join, memory)), metrics

    compiled = jax.jit(
        on_mesh(mesh, train_step),
        in_shardings=(replicated(mesh), shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=1,
        compiler_options=compiler_options(),
    )
    return partial(compiled, jax.device_put(np.uint32(seed), replicated(mesh)))


def make_eval_step(
    model: Any, objective: Any, vocabulary: Vocabulary, mesh: jax.sharding.Mesh
) -> Callable[[Any, Any, Batch], tuple[dict[str, Any], Any]]:
    """(variables, memory, batch) -> (sums, memory), without dropout; the old memory is donated.

    Sums: {"terms": {name: (sum, count)}, "metrics": {name: (sum, count)}}, which add up over batches, and
    the objective's "outputs", if it has any.
    """

    def eval_step(variables: Any, memory: Any, batch: Batch) -> tuple[dict[str, Any], Any]:
        if not objective.in_loader:
            batch = prepare(objective, batch, vocabulary, None)
        output = objective.loss(model, variables, batch, memory, None)
        counts = objective.weights(batch)
        sums = {
            "terms": {term: (total, counts[term]) for term, total in output.totals.items()},
            "metrics": output.metrics,
        } | ({} if output.outputs is None else {"outputs": output.outputs})
        return sums, memory if output.memory is None else output.memory

    return jax.jit(
        on_mesh(mesh, eval_step),
        out_shardings=(replicated(mesh), batch_sharding(mesh)),
        donate_argnums=1,
        compiler_options=compiler_options(),
    )


def compiler_options() -> dict[str, Any] | None:
    return GPU if jax.default_backend() == "gpu" else None


def on_mesh(mesh: jax.sharding.Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced with the mesh current, so that `constrain` reaches it."""

    @wraps(function)
    def traced(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return traced
