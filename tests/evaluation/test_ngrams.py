from __future__ import annotations

import math

import numpy as np
import pytest

from ctx_jax.evaluation.ngrams import Bigram, Unigram, transitions


def test_unigram_adds_one_to_each_count():
    unigram = Unigram.fit(np.array([[2, 2, 1]]), 4)  # counts 0 1 2 0, (c + 1) / (3 + 4)
    nll = unigram.nll(np.array([[0, 1], [2, 3]]))
    np.testing.assert_allclose(nll, -np.log(np.array([[1, 2], [3, 1]]) / 7))
    assert unigram.best == 2


def test_bigram_is_witten_bell_by_hand():
    # after 0: 1, 1, 2, so c = 3, k = 2; unigram of the targets 1 1 2 0: (1 + 1, 2 + 1, 1 + 1, 0 + 1) / 8
    bigram = Bigram.fit(np.array([0, 0, 0, 2]), np.array([1, 1, 2, 0]), 4)
    nll = bigram.nll(np.array([0, 0, 0, 2, 3]), np.array([1, 2, 3, 0, 1]))
    expected = [
        (2 + 2 * 3 / 8) / 5,
        (1 + 2 * 2 / 8) / 5,
        (0 + 2 * 1 / 8) / 5,
        (1 + 1 * 2 / 8) / 2,
        3 / 8,  # 3 was never seen before anything: the unigram alone
    ]
    np.testing.assert_allclose(nll, -np.log(expected))


@pytest.mark.parametrize("seed", [0, 1])
def test_probabilities_sum_to_one_after_every_token(seed):
    rng = np.random.default_rng(seed)
    size, tokens = 17, rng.zipf(1.5, 300) % 15  # 15 and 16 never occur
    bigram = Bigram.fit(tokens[:-1], tokens[1:], size)
    assert np.exp(-bigram.unigram.nll(np.arange(size))).sum() == pytest.approx(1)
    previous, targets = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    np.testing.assert_allclose(np.exp(-bigram.nll(previous, targets)).sum(1), 1, rtol=1e-12)


def test_bigram_beats_the_unigram_where_order_matters_and_keeps_only_what_occurs():
    tokens = np.tile(np.array([7, 40_000, 3, 49_999], np.uint16), 500)
    bigram = Bigram.fit(tokens[:-1], tokens[1:], 50_000)
    assert bigram.pairs.size == 5  # four pairs and the upper end, not 50,000 squared
    assert bigram.nll(tokens[:-1], tokens[1:]).mean() < 0.01
    assert bigram.unigram.nll(tokens).mean() == pytest.approx(-math.log(501 / 52_000), abs=0.01)


def test_nothing_to_fit_is_uniform():
    none = np.zeros(0, np.int32)
    np.testing.assert_allclose(Bigram.fit(none, none, 8).nll(np.array([1]), np.array([2])), math.log(8))


def test_transitions_are_what_a_stream_batch_predicts():
    batch = {
        "tokens": np.array([[1, 5, 6, 2], [1, 7, 0, 0]]),
        "documents": np.array([[1, 1, 1, 1], [2, 2, 0, 0]]),
        "next_tokens": np.array([[5, 6, 2, 1], [7, 2, 0, 0]]),
        "next_documents": np.array([[1, 1, 1, 2], [2, 2, 0, 0]]),
    }
    previous, targets = transitions(batch)
    assert previous.tolist() == [1, 5, 6, 1, 7]
    assert targets.tolist() == [5, 6, 2, 7, 2]


@pytest.mark.parametrize("token", [-1, 4])
def test_ids_outside_the_vocabulary_are_named(token):
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 4"):
        Unigram.fit(np.array([0, token]), 4)
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 4"):
        Bigram.fit(np.array([0]), np.array([1]), 4).nll(np.array([0]), np.array([token]))
