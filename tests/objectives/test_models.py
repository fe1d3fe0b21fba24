"""The objectives with the models, the readers and the text that they are for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives import row_keys
from ctx_jax.objectives.permutation import Permutation
from ctx_jax.text import open_text
from ctx_jax.training.step import prepare
from tests.tiny import smaller

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


def drawn(name: str, speeches: Path, folder: Path) -> tuple[Any, Vocabulary, Batch, Batch]:
    """The objective of an experiment, its vocabulary, and 400 rows of its reader before and after `prepare`."""
    experiment = smaller(name, speeches, folder)
    _, stores = open_text(experiment.data, ("train",))
    store, objective = stores["train"], experiment.objective
    batch = experiment.data.reader.batch(store, 0, range(400), batch_size=400, seed=0)
    batch["documents"][7] = batch["words"][7] = 0  # a row of padding
    prepared = jax.jit(partial(prepare, objective, vocabulary=store.vocabulary, seed=0))(batch)
    return objective, store.vocabulary, batch, jax.device_get(prepared)


def likely(count: int, trials: int, p: float) -> bool:
    """Binomial bound of 4.5 standard deviations."""
    return abs(count - trials * p) <= 4.5 * (trials * p * (1 - p)) ** 0.5


def test_berts_rows_are_masked_as_published(speeches: Path, folder: Path):
    _, vocabulary, batch, prepared = drawn("bert", speeches, folder)
    used = prepared["target_weights"] > 0
    lengths = (batch["documents"] > 0).sum(1)
    np.testing.assert_array_equal(used.sum(1), [min(20, max(1, round(0.15 * n))) if n else 0 for n in lengths])
    rows, _ = np.nonzero(used)
    places, targets = prepared["target_positions"][used], prepared["targets"][used]
    np.testing.assert_array_equal(targets, batch["tokens"][rows, places])
    assert (batch["documents"][rows, places] > 0).all() and not np.isin(targets, vocabulary.special).any()
    shown, total = prepared["tokens"][rows, places], len(rows)
    assert total > 1500
    assert likely((shown == vocabulary.mask).sum(), total, 0.8 + 0.1 / vocabulary.size)
    assert likely((shown == targets).sum(), total, 0.1 + 0.1 / vocabulary.size)
    chosen = np.zeros(batch["tokens"].shape, bool)
    chosen[rows, places] = True
    np.testing.assert_array_equal(prepared["tokens"][~chosen], batch["tokens"][~chosen])


def test_xlnets_targets_are_text_and_as_many_in_each_half(speeches: Path, folder: Path):
    objective, vocabulary, batch, prepared = drawn("xlnet", speeches, folder)
    used = prepared["target_weights"] > 0
    real = (batch["documents"] > 0).any(1)
    assert real.sum() == 399
    places, targets = prepared["target_positions"], prepared["targets"]
    assert (used[real]).all() and not used[~real].any()
    assert ((places[real] < 16).sum(1) == 3).all()  # the first half takes the odd one of 5
    assert objective.num_predict == 5
    np.testing.assert_array_equal(targets[real], np.take_along_axis(batch["tokens"], places, axis=1)[real])
    assert not np.isin(targets[used], vocabulary.special).any()
    np.testing.assert_array_equal(prepared["tokens"], batch["tokens"])
