"""The objectives with the models that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives import row_keys
from ctx_jax.objectives.permutation import Permutation

Rows = Callable[..., Batch]


def test_a_permuted_prediction_depends_on_what_comes_before_it_in_the_order(vocabulary: Vocabulary, make_rows: Rows):
    """Row 1 + j of the batch is row 0 with another token at position j."""
    window = {name: np.repeat(value, 25, axis=0) for name, value in make_rows(1, 24, classification="last").items()}
    objective = Permutation(num_predict=10, perm_size=12)
    keys = row_keys(0, window["epoch"], window["example"])
    batch = jax.jit(objective.prepare, static_argnums=2)(window, keys, vocabulary)
    tokens = np.array(batch["tokens"])
    tokens[np.arange(1, 25), np.arange(24)] += 1
    batch["tokens"] = jnp.asarray(tokens)
    model = XLNetConfig(
        vocabulary_size=51, width=16, layers=2, heads=2, feed_forward=16, memory_length=24, reuse_length=12
    ).build()

    @jax.jit
    def initialized(batch: Batch) -> Any:
        variables = unboxed(model.init(jax.random.key(0), batch, method="initialize"))
        return model.apply(variables, batch)

    output = initialized(batch)
    query, memory = np.asarray(output.query), np.asarray(output.memory.hidden)
    positions, ranks = np.asarray(batch["target_positions"])[0], np.asarray(batch["ranks"])[0]
    changed = (query[1:] != query[:1]).any(-1)  # [changed position, predicted position]
    np.testing.assert_array_equal(changed, ranks[:, None] < ranks[positions][None])
    assert not changed[positions, np.arange(10)].any()
    assert 0 < changed[positions].sum() < 10 * 10  # targets depend on earlier ones
    # what the memory takes of the first half knows nothing of the second
    assert (memory[1:] != memory[:1]).any(axis=(1, 2, 3)).tolist() == [True] * 12 + [False] * 12
