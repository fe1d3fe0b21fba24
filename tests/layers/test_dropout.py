"""Dropout: its mask is a function of key and place, fair, and its own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.dropout import dropout, mask, mix, words

KEY = jax.random.key(11)


def reference(x: int) -> int:
    """The finaliser, in Python's integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def kept(shape: tuple[int, ...], rate: float, key: jax.Array = KEY) -> np.ndarray:
    return np.asarray(jax.jit(mask, static_argnums=(0, 3))(shape, *words(key), rate))


def test_the_mask_by_hand():
    first, second = (int(word) for word in words(KEY))
    expected = np.zeros((2, 3, 5), bool)
    for i, j, k in np.ndindex(2, 3, 5):
        row = reference(reference((3 * i + j + first) % 2**32) ^ second)
        odd = (row * 0x85EBCA6B % 2**32) | 1
        expected[i, j, k] = (reference(k) * odd + row) % 2**32 >= round(0.3 * 2**32)
    np.testing.assert_array_equal(kept((2, 3, 5), 0.3), expected)
    assert int(mix(jnp.uint32(123456789))) == reference(123456789)


def test_an_element_depends_on_its_place_and_not_on_what_else_there_is():
    np.testing.assert_array_equal(kept((8, 6, 10), 0.5)[:3], kept((3, 6, 10), 0.5))
    np.testing.assert_array_equal(kept((8, 6, 10), 0.5)[..., :4], kept((8, 6, 4), 0.5))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_fair_and_independent(rate):
    """Means of rows, columns and all, and products of neighbours and of keys, within 5 standard errors."""
    shape = (512, 1024)
    x = kept(shape, rate) - (1 - rate)
    variance = rate * (1 - rate)
    assert abs(x.mean()) < 5 * np.sqrt(variance / x.size)
    for axis in (0, 1):
        assert np.abs(x.mean(axis)).max() < 5 * np.sqrt(variance / shape[axis])
    others = [kept(shape, rate, jax.random.key(n)) - (1 - rate) for n in (10, 12)]
    pairs = [(x[:-d], x[d:]) for d in (1, 2, 7, 64)] + [(x[:, :-d], x[:, d:]) for d in (1, 2, 8, 64, 512)]
    pairs += [(x, other) for other in others]
    for a, b in pairs:
        assert abs((a * b).mean()) < 5 * variance / np.sqrt(a.size)


def test_kept_values_are_scaled_and_the_gradient_has_the_same_mask():
    x = jax.random.normal(jax.random.key(0), (4, 6, 8))
    keep = kept(x.shape, 0.25)
    y, pull = jax.vjp(lambda x: dropout(x, 0.25, KEY), x)
    np.testing.assert_allclose(y, np.where(keep, x / 0.75, 0), rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], keep / 0.75, rtol=1e-6)
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, KEY) is x
