from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers import masks


def test_same_document_hides_other_documents_and_padding():
    query, key = jnp.array([[1, 1, 2, 0]]), jnp.array([[9, 1, 2, 0]])
    expected = [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(masks.same_document(query, key), np.array([[expected]], bool))


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_causal_is_the_loop_over_pairs(window: int | None):
    query, key = np.array([[4, 5, 6], [0, 7, 2]]), np.array([[0, 1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2, 1]])
    mask = masks.causal(jnp.array(query), jnp.array(key), window)
    assert mask.shape == (2, 1, 3, 7)
    for b, t, s in np.ndindex(2, 3, 7):
        distance = query[b, t] - key[b, s]
        assert mask[b, 0, t, s] == (distance >= 0 and (window is None or distance < window))


def test_same_length_gives_every_query_as_many_keys_as_the_memory():
    memory, length = 4, 3
    mask = masks.causal(memory + jnp.arange(length)[None], jnp.arange(memory + length)[None], window=memory)
    np.testing.assert_array_equal(mask.sum(-1), np.full((1, 1, length), memory))


def test_permutation_example():
    """Tokens [t, T, t, T, t, CLS] (T = target) with places [2, 4, 0, 1, 5, 3] in the order."""
    places = np.array([2, 4, 0, 1, 5, 3])
    target = np.array([0, 1, 0, 1, 0, 0], bool)
    special = np.array([0, 0, 0, 0, 0, 1], bool)
    ranks = jnp.where(target | special, 1 + places, 0)[None]
    blocked = [{1, 3, 5}, {1}, {1, 3, 5}, {1, 3, 5}, {1, 3, 5}, {1}]

    query_stream = masks.within(ranks, None, ranks - target)[0, 0]
    assert [set(np.flatnonzero(~row)) for row in np.array(query_stream)] == blocked
    content_stream = masks.within(ranks, None, ranks)[0, 0]
    assert [set(np.flatnonzero(~row)) for row in np.array(content_stream)] == [
        columns - {row} if target[row] else columns for row, columns in enumerate(blocked)
    ]


def test_within_has_two_bounds():
    mask = masks.within(jnp.array([[0, 1, 2, 3]]), jnp.array([[1, 0], [3, 2]]), jnp.array([[2, 0], [2, 9]]))
    expected = [[[0, 1, 1, 0], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 1, 1]]]
    np.testing.assert_array_equal(mask[:, 0], np.array(expected, bool))
