"""How many floating-point operations training needs: the matrix products of the forward pass and, twice as many, of the
backward pass. Divided by time and by what the hardware reaches in matrix products, this is the model's utilisation.

Counted is what the mathematics needs, not what an implementation spends: only pairs of positions that attention
allows, only the positions that are predicted, nothing recomputed; so utilisation never exceeds 1. Left out are
elementwise work, the tails of an adaptive softmax, and what a batch does once (the projection of relative positions).
"""

from __future__ import annotations

from typing import Any

from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig

FORWARD_AND_BACKWARD = 3
"""The backward pass has two products for each of the forward pass: one for the inputs, one for the weights."""
WITHOUT_INPUTS = 2
"""Where no gradient flows into the inputs (a memory)."""


def train_flops_per_token(config: Any, length: int, targets: int | None = None) -> float:
    """Operations of a training step, divided by the positions of the batch.

    Args:
        config: a model's configuration.
        length: positions in a row.
        targets: predicted positions in a row; None = all.

    Raises TypeError for a model that is not known here.
    """
    targets, width = length if targets is None else targets, getattr(config, "width", 0)
    match config:
        case BertConfig():
            layers = config.layers * layer(config, length, length, pairs=length * length)
            head = targets * (2 * width * width + 2 * width * config.vocabulary_size)
        case GptConfig():
            windows = {"dense": length, "local": config.band}
            pattern = [windows[kind] for kind in config.attention_pattern]
            period = sum(layer(config, length, length, pairs=causal_pairs(length, window)) for window in pattern)
            layers = config.layers // len(pattern) * period
            head = targets * 2 * width * config.vocabulary_size
        case TransformerXLConfig():
            pairs = causal_pairs(length, length) + length * config.memory_length
            layers = config.layers * (layer(config, length, length, pairs, relative=True) + memory(config))
            columns = config.cutoffs[0] + len(config.cutoffs) if config.cutoffs else config.vocabulary_size
            narrow = config.embedding_width or width
            head = targets * 2 * narrow * columns
            if narrow != width or (config.embedding_divisor > 1 and config.project_equal):
                head += (length + targets) * 2 * narrow * width
        case XLNetConfig():
            keys = length + config.memory_length
            content = layer(config, length, length, pairs=length * keys, relative=True)
            query = layer(config, targets, 0, pairs=targets * keys, relative=True)
            unused = layer(config, length, 0, pairs=length * keys, relative=True)  # the last layer's content stream
            layers = config.layers * (content + query + memory(config)) - unused
            head = targets * 2 * width * config.vocabulary_size
        case _:
            raise TypeError(f"the operations of {type(config).__name__} are not known: add it to {__name__}")
    return FORWARD_AND_BACKWARD * (layers + head) / length


def layer(config: Any, queries: int, keys: int, pairs: int, relative: bool = False) -> float:
    """Forward operations of one layer on one row: queries and outputs, keys and values, the feed-forward network, and
    two products for each pair of query and key (three with relative positions)."""
    square = 2 * config.width * config.width
    linear = queries * (2 * square + 4 * config.width * config.feed_forward) + keys * 2 * square
    return linear + pairs * (3 if relative else 2) * 2 * config.width


def memory(config: Any) -> float:
    """What a layer spends on the keys and values of its memory, as forward operations with a whole backward pass."""
    return config.memory_length * 4 * config.width * config.width * WITHOUT_INPUTS / FORWARD_AND_BACKWARD


def causal_pairs(length: int, window: int) -> int:
    """Pairs of a query and the nearest `window` keys up to itself."""
    window = min(window, length)
    return window * (window + 1) // 2 + (length - window) * window
