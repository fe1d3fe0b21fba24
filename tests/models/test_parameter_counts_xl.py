"""Parameters of the published sizes, by shape evaluation alone (SPEC: the papers' and their code's)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ctx_jax.layers.parameters import axes_of
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig

WIKITEXT = {"vocabulary_size": 267735, "cutoffs": (20000, 40000, 200000)}
LARGE = {"width": 1024, "heads": 16, "feed_forward": 4096}
HEAD_BIAS, POOLER = 32_000, 768 * 768 + 768
COUNTS = {
    "enwik8 base": (TransformerXLConfig(vocabulary_multiple=1), 41_055_436),
    "wt103 base": (
        TransformerXLConfig(
            vocabulary_multiple=1, width=410, layers=16, heads=10, feed_forward=2100, memory_length=150, **WIKITEXT
        ),
        151_107_538,
    ),
    "wt103 base, u and v of each layer": (
        TransformerXLConfig(
            vocabulary_multiple=1, width=410, layers=16, heads=10, feed_forward=2100, untie_biases=True, **WIKITEXT
        ),
        151_107_538 + 15 * 2 * 410,
    ),
    # The paper says 257M. By hand: tables, projections in, the head's out, biases, the tails' columns, layers.
    "wt103 large": (
        TransformerXLConfig(
            vocabulary_multiple=1, layers=18, embedding_divisor=4, untie_biases=True, **LARGE, **WIKITEXT
        ),
        (20_000 * 1024 + 20_000 * 256 + 160_000 * 64 + 67_735 * 16)
        + (1024 + 256 + 64 + 16) * 1024
        + 1024 * 1024
        + 267_735
        + 3 * 1025
        + 18 * (5 * 1024 * 1024 + 2 * 1024 + 4 * 1024 + 2 * 1024 * 4096 + 4096 + 1024),
    ),
    "xlnet base": (XLNetConfig(vocabulary_multiple=1), 116_718_336 + HEAD_BIAS),
    "xlnet base, padded": (XLNetConfig(vocabulary_multiple=1024), 116_718_336 + HEAD_BIAS + 768 * 769),
    "xlnet base with a classifier": (
        XLNetConfig(vocabulary_multiple=1, pooler=True, classes=2),
        116_718_336 + HEAD_BIAS + POOLER + 2 * 768 + 2,
    ),
    "xlnet large": (XLNetConfig(vocabulary_multiple=1, layers=24, **LARGE), 360_268_800 + HEAD_BIAS),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name: str):
    config, count = COUNTS[name]
    model: Any = config.build()
    ones = jnp.ones((1, 4), jnp.int32)
    batch = {"tokens": ones, "documents": ones}
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="initialize"))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == count
    axes_of(variables)  # every parameter names its axes
