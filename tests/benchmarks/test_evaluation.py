from __future__ import annotations

import jax.numpy as jnp
import pytest

from ctx_jax.contract import Memory, Vocabulary
from ctx_jax.objectives.segment import Segment
from experiments.benchmarks import evaluation

SMALL = {"width": 8, "layers": 1, "heads": 2, "feed_forward": 16}


def test_the_vanilla_model_predicts_its_last_position():
    ones, ids = jnp.ones((1, 4), jnp.int32), jnp.array([[5, 6, 7, 8]])
    batch = {"tokens": ids, "next_tokens": ids + 1, "documents": ones, "next_documents": ones}
    batch["positions"] = jnp.arange(4)[None]
    batch = evaluation.Last().prepare(batch, jnp.zeros(1), Vocabulary(10, *range(7)))
    assert (batch["targets"].tolist(), batch["target_positions"].tolist()) == ([[9]], [[3]])
    assert evaluation.Last().weights(batch) == {"lm": 1.0}


@pytest.mark.parametrize(("clamp", "distances"), [(None, 8), (9, 8), (3, 4)])
def test_both_models_see_as_many_keys_for_each_token(monkeypatch, clamp, distances):
    """8 keys: a window of 8 for each token, or segments of 4 with their own keys and those of 8 remembered places."""
    batches = []

    def evaluator(config, objective, rows, length):
        batches.append((type(config).__name__, type(objective).__name__, rows, length))
        return batches[-1]

    monkeypatch.setattr(evaluation, "evaluator", evaluator)
    monkeypatch.setattr(evaluation, "seconds", lambda model, warm, steps: 3e-3 if model[0] == "GptConfig" else 1e-3)
    result = evaluation.measure(8, 4, clamp, 16, 2, 1, SMALL)
    assert batches == [("GptConfig", "Last", 2, 8), ("TransformerXLConfig", "Segment", 4, 4)]
    assert (result["vanilla_us"], result["ours_us"], result["speedup"]) == (1500, 62.5, 24)
    dense, head = 2 * (4 * 64 + 2 * 8 * 16), 2 * 8 * 263
    vanilla = 8 * dense + 4 * 8 * 36 + head
    ours = dense + (4 * 8 + 2 * distances) * 8 + head + 2 * (4 * 64)
    assert result["flops_ratio"] == round(vanilla / ours, 1)
    assert result["share"] == pytest.approx(24 / (vanilla / ours), rel=1e-3)


def test_the_memory_is_carried():
    """From call to call: after two segments of 2 its 4 places are full."""
    _, config = evaluation.configs(4, None, SMALL)
    evaluate = evaluation.evaluator(config, Segment(), 2, 2)
    assert evaluation.seconds(evaluate, 1, 1) > 0
    (memory,) = [cell.cell_contents for cell in evaluate.__closure__ or () if isinstance(cell.cell_contents, Memory)]
    assert (memory.documents == 1).all() and memory.hidden.shape == (2, 1, 4, 8)
    assert (memory.hidden[:, :, :2] == memory.hidden[:, :, 2:]).all()  # one layer remembers embeddings alone
