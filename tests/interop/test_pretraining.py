"""Pretraining batches as the original data code makes them, and ours from the same random choices: equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.masks import Visibility
from ctx_jax.layers.relative import distances, encode
from ctx_jax.objectives.permutation import Permutation
from tests.golden.pretraining import (
    BERT,
    PIECES,
    XLNET,
    Arrays,
    bert_prepared,
    bert_rows,
    load_record,
    xlnet_prepared,
)

BELOW = -(2**31)


@pytest.fixture(scope="module")
def pieces() -> Arrays:
    return load_record("bert_pretraining")


@pytest.fixture(scope="module")
def permuted() -> Arrays:
    return load_record("xlnet_pretraining")


def test_bert_pairs(pieces: Arrays):
    """The reader: sentences gathered, cut, replaced and truncated, over two copies of six documents."""
    batch = bert_rows(pieces)
    np.testing.assert_array_equal(batch["tokens"], pieces["original_ids"])
    np.testing.assert_array_equal(batch["segments"], pieces["segment_ids"])
    np.testing.assert_array_equal(batch["documents"], pieces["input_mask"])
    np.testing.assert_array_equal(batch["relation"], pieces["next_sentence_labels"][:, 0])
    cut, short = (pieces["draws"][:, 0] == 2) & (pieces["draws"][:, 2:].sum(1) > 0), pieces["input_mask"].sum(1) < 32
    assert 0 < batch["relation"].sum() < len(short) and cut.sum() > 5 and short.sum() > 5  # the text has every case


def test_bert_masking(pieces: Arrays):
    """The objective: where, how many, what is shown there, and what is predicted."""
    batch, own = bert_prepared(pieces), pieces["original_ids"]
    np.testing.assert_array_equal(batch["tokens"], pieces["input_ids"])
    np.testing.assert_array_equal(batch["target_positions"], pieces["masked_lm_positions"])
    np.testing.assert_array_equal(batch["target_weights"], pieces["masked_lm_weights"])
    predicted = batch["target_weights"] > 0  # where nothing is, they have [PAD] and we the row's first token
    np.testing.assert_array_equal(batch["targets"][predicted], pieces["masked_lm_ids"][predicted])
    shown = np.take_along_axis(pieces["input_ids"], pieces["masked_lm_positions"], axis=1)[predicted]
    kept = shown == np.take_along_axis(own, pieces["masked_lm_positions"], axis=1)[predicted]
    assert 0.7 < (shown == BERT.mask).mean() < 0.9 and kept.sum() > 3 and (~kept & (shown != BERT.mask)).sum() > 3


def test_bert_whole_words():
    """The same with whole words. A second segment that was cut within a word begins, with us, with a word of its own;
    theirs takes it for the rest of the first segment's last word."""
    record = load_record("bert_whole_words")
    batch, own = bert_prepared(record, whole_words=True), record["original_ids"]
    goes_on = np.array([piece.startswith("##") for piece in PIECES])[own]
    across = (goes_on[:, 1:] & (own[:, :-1] == BERT.separator)).any(1)
    assert 5 < across.sum() < 15
    for ours, theirs in (("tokens", "input_ids"), ("target_positions", "masked_lm_positions")):
        np.testing.assert_array_equal(batch[ours][~across], record[theirs][~across])
    np.testing.assert_array_equal(batch["target_weights"][~across], record["masked_lm_weights"][~across])
    masked = np.zeros_like(own, bool)
    np.put_along_axis(masked, record["masked_lm_positions"], True, axis=1)
    masked[:, 0] = False  # where there is no position
    assert (masked[:, 1:] & goes_on[:, 1:])[~across].sum() > 20
    inside = goes_on[:, 1:] & (own[:, :-1] > BERT.mask)
    assert (masked[:, 1:] == masked[:, :-1])[inside & ~across[:, None]].all()  # a word is masked whole or not at all


@pytest.mark.parametrize("number", range(6))
def test_xlnet_permutation(number: int, permuted: Arrays):
    """Who sees whom in either stream, what is predicted where: less than could be where SEP or CLS was drawn."""
    batch = xlnet_prepared(permuted, number)
    theirs = {name: x[number] for name, x in permuted.items()}
    rows, length = theirs["input_k"].shape
    np.testing.assert_array_equal(batch["tokens"], theirs["input_k"])
    np.testing.assert_array_equal(batch["target_positions"], theirs["target_mapping"].argmax(-1))
    np.testing.assert_array_equal(batch["target_weights"], theirs["target_mask"])
    np.testing.assert_array_equal(batch["targets"] * theirs["target_mask"], theirs["target"])
    ones, ranks = jnp.ones((rows, length), jnp.int32), jnp.asarray(batch["ranks"])
    below = jnp.full((1, 1), BELOW)
    content, query = (Visibility(ones, ones, ranks, below, ranks - before).mask()[:, 0] for before in (0, 1))
    blocked = theirs["perm_mask"].astype(bool)
    np.testing.assert_array_equal(content, ~(blocked & ~np.eye(length, dtype=bool)))
    targets = theirs["input_q"].astype(bool)
    np.testing.assert_array_equal(np.asarray(query)[targets], ~blocked[targets])
    assert (theirs["input_k"] == XLNET.separator).sum() == 2 * rows and blocked.any() and not blocked.all()


def test_xlnet_spans():
    """Which positions of a segment are chosen. Theirs drops a span that reaches the end, and tops up at random."""
    record, objective = load_record("xlnet_spans"), Permutation(context=6)
    rows, size = record["tokens"].shape
    contexts = -(-size // 7)
    edges = np.cumsum([0.0, *(np.array(objective.spans) / sum(objective.spans))])
    noise = np.zeros((rows, 2 * contexts + size), np.uint32)
    lengths = record["lengths"][:, :contexts]
    noise[:, :contexts] = (edges[lengths - 1] + edges[lengths]) / 2 * 2**32
    noise[:, contexts : 2 * contexts] = record["places"][:, :contexts]
    noise[:, 2 * contexts :] = 1000
    for row, places in enumerate(record["more"]):
        for order, place in reversed(list(enumerate(places[places >= 0]))):
            noise[row, 2 * contexts + place] = 2 * order
    text = np.ones((rows, size), bool)
    choose: Any = jax.vmap(replace(objective, perm_size=size)._choose, (0, 0, 0, None))
    ours = np.asarray(choose(noise, text, record["tokens"] % 3 != 0, 8))
    differ = (ours != record["chosen"]).any(1)
    assert differ.sum() < 15 and ours[differ, -1].all()
    assert (record["lengths"] > 1).sum() > 50 and (record["more"] >= 0).sum() > 50


def test_xlnet_relative_positions_and_segments(permuted: Arrays):
    """As the original model sees them, without a memory and with one of 16; half of the rows are reversed."""
    seen = load_record("xlnet/outputs")
    for number, memory in enumerate((0, 16)):
        batch = xlnet_prepared(permuted, number)
        n = distances(32, memory + 32)
        ours = encode(jnp.stack([n, -n])[batch["reversed"].astype(int)], 24, jnp.float32)
        theirs = seen[f"{number}/relative"]  # begins with a distance that is never met
        np.testing.assert_allclose(ours, theirs[:, 1:], atol=1e-5)
        assert np.abs(theirs[0] - theirs[-1]).max() > 1  # the directions differ
        segments = batch["segments"]
        other = segments[:, :, None] != np.pad(segments, ((0, 0), (memory, 0)))[:, None, :]
        np.testing.assert_array_equal(other, seen[f"{number}/other_segment"])
        assert {0, 1, 2} == set(segments.flat)
