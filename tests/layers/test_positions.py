from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ctx_jax.layers.positions import counted, sinusoids


def test_sinusoids_are_sines_then_cosines():
    positions, width = np.array([[-3, 0], [1, 500]]), 6
    expected = np.zeros((2, 2, width))
    for index in np.ndindex(2, 2):
        for i in range(width // 2):
            angle = positions[index] / 10000 ** (2 * i / width)
            expected[index][i], expected[index][width // 2 + i] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoids(jnp.array(positions), width), expected, atol=5e-5)


def test_counted_leaves_padding_out_wherever_it_stands():
    documents = jnp.array([[0, 0, 1, 1, 2], [1, 2, 2, 0, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    places = counted(documents)
    np.testing.assert_array_equal(places[0, 2:], [0, 1, 2])
    np.testing.assert_array_equal(places[1, :3], [0, 1, 2])
    np.testing.assert_array_equal(places[2, jnp.array([0, 3, 4])], [0, 1, 2])
    assert places.min() == 0  # padding too has a row in a position table
