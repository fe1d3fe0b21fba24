"""Runs with random parameters, each of another model, that know the words of the speeches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.experiment import save
from ctx_jax.layers.parameters import unboxed
from ctx_jax.serialization import to_json
from ctx_jax.text import TOKENIZER, own_tokenizer
from ctx_jax.training.checkpoints import Checkpoints
from ctx_jax.training.loop import READER
from ctx_jax.training.state import TrainState
from tests.tiny import smaller

MODELS = ("bert", "gpt", "transformer_xl", "xlnet")


@pytest.fixture(scope="session")
def run_of(speeches: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of this model, whose features differ widely from text to text."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        run = tmp_path_factory.mktemp(name)
        experiment = smaller(name, speeches, folder)
        if name == "xlnet":
            experiment = replace(experiment, model=replace(experiment.model, pooler=True))
        rng = np.random.default_rng(0)

        def value(path: Any, leaf: Any) -> np.ndarray:
            mean, deviation = {"scale": (1.0, 0.1), "kernel": (0.0, 0.5)}.get(path[-1].key, (0.0, 0.3))
            return rng.normal(mean, deviation, leaf.shape).astype(np.float32)

        model, row = experiment.model.build(), jnp.zeros((1, 2), jnp.int32)
        batch = {"tokens": row, "documents": row, "positions": row}
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="initialize"))
        params = jax.tree_util.tree_map_with_path(value, unboxed(shapes["params"]))
        save(experiment, run / "experiment.json")
        with Checkpoints(run, keep=1) as checkpoints:
            state = TrainState(np.int32(0), params, {}, None, None)
            checkpoints.save(0, state, {"experiment": to_json(experiment), READER: 0})
        shutil.copytree(own_tokenizer(experiment.data).folder, run / TOKENIZER)
        return run

    def once(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return once
