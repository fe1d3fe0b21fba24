"""Each of the four models trains alike on one device and on eight, with the batch whole and in micro-batches."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ctx_jax.data.loader import Loader
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.text import open_text
from ctx_jax.training.optimizers import Sgd
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import abstract_state, init_state, shardings_of
from ctx_jax.training.step import loader_transform, make_train_step, prepared_shapes
from tests.tiny import smaller


def trained(experiment: Any, mesh: jax.sharding.Mesh, accumulation: int) -> tuple[list[float], Any]:
    """The losses of three steps and the state after them."""
    _, stores = open_text(experiment.data, ("train",))
    store, data, objective = stores["train"], experiment.data, experiment.objective
    model, optimizer = experiment.model.build(), experiment.optimizer.build(3)
    shapes = prepared_shapes(objective, data.reader, store, data.batch_size)
    shardings = shardings_of(abstract_state(model, optimizer, shapes, mesh))
    state = init_state(model, optimizer, shapes, mesh, seed=0)
    step = make_train_step(model, objective, optimizer, store.vocabulary, shardings, seed=0, accumulation=accumulation)
    transform = loader_transform(objective, store, 0)
    losses = []
    loader = Loader(store, data.reader, data.batch_size, 0, batch_sharding(mesh), transform=transform)
    with closing(iter(loader)) as batches:
        for _ in range(3):
            state, metrics = step(state, next(batches))
            losses.append(float(metrics["loss"]))
    assert step.func._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    return losses, state


@pytest.mark.parametrize("name", ["gpt", "transformer_xl", "bert", "xlnet"])
def test_one_device_is_eight(name: str, speeches: Path, folder: Path):
    """Mesh data 2 x fsdp 2 x tensor 2 with two micro-batches, against one device with one, in fp32 without dropout."""
    experiment = smaller(name, speeches, folder)
    experiment = replace(
        experiment,
        data=replace(experiment.data, batch_size=8),
        model=replace(experiment.model, dropout=0.0, attention_dropout=0.0),
        optimizer=Sgd(schedule=WarmUp(rate=0.5, decay="constant")),
    )
    one_losses, one = trained(experiment, Mesh(1, 1, 1).build(jax.devices()[:1]), 1)
    eight_losses, eight = trained(experiment, Mesh(2, 2, 2).build(), 2)
    np.testing.assert_allclose(eight_losses, one_losses, rtol=2e-6)
    for path, expected in jax.tree_util.tree_leaves_with_path((one.params, one.memory)):
        found = dict(jax.tree_util.tree_leaves_with_path((eight.params, eight.memory)))[path]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6, err_msg=jax.tree_util.keystr(path))
    assert one_losses[2] < one_losses[0]
