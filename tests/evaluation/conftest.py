"""Language models with random parameters that know the words of the speeches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.parameters import unboxed
from ctx_jax.runs import Trained
from ctx_jax.text import own_tokenizer
from tests.tiny import smaller


@pytest.fixture(scope="session")
def language_model(speeches: Path, folder: Path) -> Callable[[str], Trained]:
    """An opened run of this model, one layer deep, whose probabilities are far from even."""

    def make(name: str) -> Trained:
        experiment = smaller(name, speeches, folder)
        experiment = replace(experiment, model=replace(experiment.model, layers=1))
        model, row, rng = experiment.model.build(), jnp.zeros((1, 2), jnp.int32), np.random.default_rng(0)
        batch = {"tokens": row, "documents": row, "positions": row}
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="initialize"))["params"]
        params = jax.tree.map(lambda leaf: rng.normal(0.2, 0.3, leaf.shape).astype(np.float32), unboxed(shapes))
        mesh = experiment.mesh.build(jax.devices()[:1])
        return Trained(experiment, own_tokenizer(experiment.data), mesh, model, {"params": params}, 7)

    return make
