"""The train step with the real models, objectives and readers: how it is computed does not change what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ctx_jax.contract import Batch, Reader, TokenStore
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.text import open_text
from ctx_jax.training.optimizers import Sgd
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import init_state
from ctx_jax.training.step import loader_transform, make_train_step, prepared_shapes
from tests.tiny import smaller

MESH = Mesh().build(jax.devices()[:1])
ROWS, LENGTH, ACCUMULATION = 4, 32, 2


def uneven(reader: Reader, store: TokenStore, n: int) -> Batch:
    """Batch n of the reader; the first row is whole, the second ends early, the last is padding throughout."""
    batch = reader.batch(store, n, range(ROWS), batch_size=ROWS, seed=0)
    padding = np.arange(LENGTH) >= np.array([LENGTH, 20, 28, 0])[:, None]
    padded = ("tokens", "documents", "words", "next_tokens", "next_documents")
    return {name: np.where(padding, 0, x) if name in padded else x for name, x in batch.items()}


@pytest.mark.parametrize("name", ["gpt", "transformer_xl", "bert", "xlnet"])
def test_rematerialised_micro_batches_are_the_full_batch(name: str, speeches: Path, folder: Path):
    """Parameters, memory and metrics of three steps, with unequal numbers of targets; compiled once."""
    experiment = smaller(name, speeches, folder)
    _, stores = open_text(experiment.data, ("train",))
    store, reader, objective = stores["train"], experiment.data.reader, experiment.objective
    config = replace(experiment.model, dropout=0.0, attention_dropout=0.0)
    assert config.scan and not config.remat
    optimizer = Sgd(schedule=WarmUp(rate=0.5, decay="constant")).build(3)
    initial = init_state(config.build(), optimizer, prepared_shapes(objective, reader, store, ROWS), MESH, seed=0)
    shardings, initial = jax.tree.map(lambda x: x.sharding, initial), jax.device_get(initial)
    transform = loader_transform(objective, store, 0) or (lambda batch: batch)
    batches = [transform(uneven(reader, store, n)) for n in range(3)]

    def trained(config: Any, accumulation: int) -> Any:
        model, seed = config.build(), 0
        step = make_train_step(
            model, objective, optimizer, store.vocabulary, shardings, seed=seed, accumulation=accumulation
        )
        state, metrics = jax.device_put(initial, shardings), []
        for batch in batches:
            state, measured = step(state, jax.device_put(batch, batch_sharding(MESH)))
            metrics.append(measured)
        assert step.func._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
        return jax.device_get((state, metrics))

    expected, found = trained(config, 1), trained(replace(config, remat=True), ACCUMULATION)
    np.testing.assert_allclose([m["loss"] for m in found[1]], [m["loss"] for m in expected[1]], rtol=2e-6)
    others = dict(jax.tree_util.tree_leaves_with_path(found))
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        np.testing.assert_allclose(others[path], value, rtol=1e-4, atol=2e-6, err_msg=jax.tree_util.keystr(path))
