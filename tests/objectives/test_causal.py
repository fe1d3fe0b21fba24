from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.objectives import row_keys
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.segment import Segment

KEYS = row_keys(0, 0, np.arange(4))


def stream() -> Batch:
    """Four windows of a stream of documents, the last row padding a short batch."""
    documents = np.array([[1, 1, 1, 2, 2], [2, 3, 3, 3, 3], [3, 3, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    next_documents = np.array([[1, 1, 2, 2, 2], [3, 3, 3, 3, 4], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    tokens = np.array([[1, 2, 3, 4, 5], [6, 7, 1, 2, 3], [4, 5, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    next_tokens = np.array([[2, 3, 4, 5, 6], [7, 1, 2, 3, 4], [5, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    return {
        "tokens": tokens,
        "documents": documents,
        "next_tokens": next_tokens,
        "next_documents": next_documents,
    }


def test_each_position_predicts_the_next_token_of_its_document(vocabulary: Vocabulary):
    batch = Causal().prepare(stream(), KEYS, vocabulary)
    np.testing.assert_array_equal(batch["targets"], stream()["next_tokens"])
    expected = [[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batch["target_weights"], expected)
    assert float(Causal().weights(batch)["lm"]) == 8
    np.testing.assert_array_equal(batch["tokens"], stream()["tokens"])


def test_a_reader_without_next_tokens_is_refused(vocabulary: Vocabulary):
    batch = {"tokens": stream()["tokens"], "documents": stream()["documents"]}
    with pytest.raises(ValueError, match="objective Segment needs 'next_tokens' in the batch: choose a reader"):
        Segment().prepare(batch, KEYS, vocabulary)


def test_loss_is_the_sum_over_predicted_tokens(vocabulary: Vocabulary, table_model: Any):
    batch = Causal().prepare(stream(), KEYS, vocabulary)
    table = np.zeros((8, 8), np.float32)
    table[2, 3] = np.log(9.0)  # after 2, token 3 has probability 9 / 16 instead of 1 / 8; it is right both times
    output = Causal().loss(table_model(), {"table": jnp.asarray(table)}, batch, None, None)
    expected = 6 * np.log(8) + 2 * np.log(16 / 9)
    np.testing.assert_allclose(output.totals["lm"], expected, rtol=1e-6)
    np.testing.assert_allclose(output.metrics["nll"], (expected, 8), rtol=1e-6)
    # argmax of equal logits is token 0, which is never a predicted target
    assert [float(x) for x in output.metrics["accuracy"]] == [2, 8]


def test_micro_batches_add_up(vocabulary: Vocabulary, table_model: Any):
    batch = Causal().prepare(stream(), KEYS, vocabulary)
    variables = {"table": jax.random.normal(jax.random.key(1), (8, 8))}
    whole = Causal().loss(table_model(), variables, batch, None, None)
    parts = [{name: value[b::2] for name, value in batch.items()} for b in range(2)]
    counts = [float(Causal().weights(part)["lm"]) for part in parts]
    assert counts == [5, 3]
    losses = [Causal().loss(table_model(), variables, part, None, None) for part in parts]
    np.testing.assert_allclose(sum(x.totals["lm"] for x in losses), whole.totals["lm"], rtol=1e-6)
    for name, (total, count) in whole.metrics.items():
        np.testing.assert_allclose(sum(x.metrics[name][0] for x in losses), total, rtol=1e-6)
        assert sum(x.metrics[name][1] for x in losses) == count


def test_only_segment_renews_the_memory(vocabulary: Vocabulary, table_model: Any):
    variables = {"table": jnp.zeros((8, 8))}
    batch = Segment().prepare(stream(), KEYS, vocabulary)
    assert Segment().loss(table_model(), variables, batch, jnp.int32(3), None).memory == 4
    assert Causal().loss(table_model(), variables, batch, jnp.int32(3), None).memory == 3
