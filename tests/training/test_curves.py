"""20 training steps from imported weights, beside PyTorch's on the same batches (tests/golden/record_curves.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.interop import import_folder
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import abstract_state, init_state, shardings_of
from ctx_jax.training.step import make_train_step, prepare
from tests.golden.compare import HERE

CURVES = json.loads((HERE / "curves.json").read_text())
MESH = Mesh().build(jax.devices()[:1])


@dataclass(frozen=True)
class Given(Masked):
    """BERT's losses of targets that the batch has already."""

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        return batch


OBJECTIVES = {"gpt2_lm": Causal(), "bert_pretraining": Given(relation=1.0)}


def batch_of(recorded: dict[str, Any], causal: bool) -> Batch:
    tokens = np.array(recorded["tokens"], np.int32)
    rows, length = tokens.shape
    documents = (np.arange(length) < np.array(recorded["lengths"])[:, None]).astype(np.int32)
    kept = length - causal
    batch = {
        "tokens": tokens[:, :kept],
        "documents": documents[:, :kept],
        "positions": np.tile(np.arange(kept, dtype=np.int32), (rows, 1)),
        "example": np.arange(rows, dtype=np.int32),
        "epoch": np.zeros(rows, np.int32),
    }
    if causal:
        return {**batch, "next_tokens": tokens[:, 1:], "next_documents": documents[:, 1:]}
    weights = np.ones((rows, 4), np.float32)
    weights[0, -1] = 0
    names = {"segments": "segments", "target_positions": "places", "targets": "targets", "relation": "relation"}
    arrays = {ours: np.array(recorded[theirs], np.int32) for ours, theirs in names.items()}
    return {**batch, **arrays, "target_weights": weights}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_curve_is_that_of_pytorch(name: str):
    """Losses; so the gradient, its clipping, the rate's warm-up and decay, Adam, and what weight decay spares."""
    curve, settings, objective = CURVES[name], CURVES["settings"], OBJECTIVES[name]
    imported = import_folder(HERE / name)
    model = replace(imported.config, dropout=0.0, attention_dropout=0.0).build()
    schedule = WarmUp(settings["rate"], settings["warmup"])
    optimizer = AdamW(schedule, clip=settings["clip"], weight_decay=settings["decay"]).build(settings["total"])
    vocabulary = Vocabulary(imported.config.vocabulary_size, 0, 0, 0, 0, 0, 0, 0)
    batches = [batch_of(batch, name == "gpt2_lm") for batch in curve["batches"]]
    shapes = prepare(objective, batches[0], vocabulary, 0)
    shardings = shardings_of(abstract_state(model, optimizer, shapes, MESH))
    state = init_state(model, optimizer, shapes, MESH, seed=0)
    state = state._replace(params=jax.device_put(imported.params, shardings.params))
    step = make_train_step(model, objective, optimizer, vocabulary, shardings, seed=0)
    found = []
    for batch in batches:
        state, metrics = step(state, jax.device_put(batch, batch_sharding(MESH)))
        found.append([float(metrics[key]) for key in ("loss", "grad_norm", "learning_rate")])
    losses, norms, rates = np.array(found).T
    np.testing.assert_allclose(rates, curve["rates"], rtol=1e-6)
    np.testing.assert_allclose(losses, curve["losses"], rtol=1e-4)
    np.testing.assert_allclose(norms, curve["norms"], rtol=1e-3)
    assert max(curve["norms"]) > settings["clip"]  # which the clipping cuts
