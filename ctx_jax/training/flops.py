"""How many floating-point operations a model needs: the matrix products of the forward pass and, in training, twice as
many of the backward pass. Divided by time and by what the hardware reaches in matrix products, this is the model's
utilisation.

Counted is what the mathematics needs, not what an implementation spends: only pairs of positions that attention
allows, only the positions that are predicted, nothing recomputed; so utilisation never exceeds 1. A row is one
document without padding, the memory full, all parameters trained. Left out are elementwise work, the tails of an
adaptive softmax, heads for classes, and what is done once for a row (poolers) or a batch (the projection of relative
positions).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.objectives.spans import Spans
from ctx_jax.objectives.supervised import Supervised
from ctx_jax.objectives.tags import Tags

FORWARD_AND_BACKWARD = 3
"""The backward pass has two products for each of the forward pass: one for the inputs, one for the weights."""
WITHOUT_INPUTS = 2
"""The same where no gradient flows into the inputs."""


class Operations(NamedTuple):
    """Of the forward pass on one row."""

    window: float
    memory: float
    """Keys and values of the memory, into which no gradient flows."""


def step_flops_per_token(config: Any, objective: Any, length: int, targets: int | None = None) -> float:
    """Operations of an experiment's training step, divided by the positions of the batch: those of its model, and what
    the objective needs beyond it. Arguments as `train_flops_per_token`; `targets` counts where tokens are predicted."""
    match objective:
        case Tags() | Spans():
            return train_flops_per_token(config, length, targets=0)
        case Supervised():
            once = train_flops_per_token(config, length, None if objective.language_model else 0)
            return 2 * once if objective.both_orders else once
        case Distillation():  # the masked positions are among the soft ones; the teacher's pass is forward only
            soft = targets if objective.masked_only else length
            teacher = forward_flops_per_token(objective.teacher, length, soft)
            return train_flops_per_token(config, length, soft) + teacher
    return train_flops_per_token(config, length, targets, getattr(objective, "perm_size", None))


def train_flops_per_token(config: Any, length: int, targets: int | None = None, block: int | None = None) -> float:
    """Operations of a training step, divided by the positions of the batch.

    Args:
        config: a model's configuration.
        length: positions in a row.
        targets: predicted positions in a row; None = all.
        block: positions of a block of a permuted order (`Permutation.perm_size`); None = the row.

    Raises TypeError for a model that is not known here.
    """
    if isinstance(config, TransformerXLConfig):  # dropout of what encodes them tells equal distances apart
        config = replace(config, clamp_length=None)
    forward = operations(config, length, targets, block)
    return (FORWARD_AND_BACKWARD * forward.window + WITHOUT_INPUTS * forward.memory) / length


def forward_flops_per_token(config: Any, length: int, targets: int | None = None, block: int | None = None) -> float:
    """Operations of an evaluation step, divided by the positions of the batch; arguments as `train_flops_per_token`."""
    return sum(operations(config, length, targets, block)) / length


def operations(config: Any, length: int, targets: int | None, block: int | None) -> Operations:
    targets, width = length if targets is None else targets, getattr(config, "width", 0)
    remembered = getattr(config, "memory_length", 0)
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
            pairs = length * remembered + (0 if config.same_length else causal_pairs(length, length))
            layers = config.layers * layer(config, length, length, pairs, clamped(config, length, pairs))
            columns = config.cutoffs[0] + len(config.cutoffs) if config.cutoffs else config.vocabulary_size
            narrow = config.embedding_width or width
            head = targets * 2 * narrow * columns
            if narrow != width or (config.embedding_divisor > 1 and config.project_equal):
                head += (length + targets) * 2 * narrow * width
        case XLNetConfig(causal=True):  # cannot be permuted, so that there is no query stream
            pairs = length * remembered + causal_pairs(length, length)
            layers = config.layers * layer(config, length, length, pairs, pairs)
            head = targets * 2 * width * config.vocabulary_size
        case XLNetConfig():
            seen, asked = permuted_pairs(length, targets, block or length)
            content = layer(config, length, length, length * remembered + seen, length * remembered + seen)
            query = layer(config, targets, 0, targets * remembered + asked, targets * remembered + asked)
            # of the last layer's content stream a query stream needs keys and values; a head reads all of it
            unused = content - layer(config, 0, length, pairs=0) if targets else 0
            layers = config.layers * (content + query) - unused
            head = targets * 2 * width * config.vocabulary_size
        case _:
            raise TypeError(f"the operations of {type(config).__name__} are not known: add it to {__name__}")
    return Operations(layers + head, getattr(config, "layers", 0) * layer(config, 0, remembered, pairs=0))


def layer(config: Any, queries: int, keys: int, pairs: float, distances: float = 0) -> float:
    """Forward operations of one layer on one row: queries and outputs, keys and values, the feed-forward network, two
    products for each pair of query and key, and one for each pair of query and distance."""
    square = 2 * config.width * config.width
    linear = queries * (2 * square + 4 * config.width * config.feed_forward) + keys * 2 * square
    return linear + (2 * pairs + distances) * 2 * config.width


def clamped(config: TransformerXLConfig, length: int, pairs: float) -> float:
    """Pairs of a query and a distance: the keys from `clamp_length` on have one together."""
    if config.clamp_length is None:
        return pairs
    near = config.clamp_length + 1
    if config.same_length:
        return length * min(config.memory_length, near)
    # a query at place n of the window sees `memory_length` + n + 1
    return sum(min(config.memory_length + n + 1, near) for n in range(length))


def causal_pairs(length: int, window: int) -> int:
    """Pairs of a query and the nearest `window` keys up to itself."""
    window = min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


def permuted_pairs(length: int, targets: int, block: int) -> tuple[float, float]:
    """Pairs of the content and of the query stream in a row whose blocks are each in an order of their own, with as
    many targets: all positions see the blocks before and what is no target in their own; a target sees the targets
    before it and, in the content stream, itself. Separators, which are ordered like targets, count as what is none."""
    blocks = length // block
    chosen = targets / blocks
    before, context = block * (blocks - 1) / 2, block - chosen
    among = chosen * (chosen - 1) / 2
    content = block * (before + context) + among + chosen
    query = chosen * (before + context) + among
    return blocks * content, blocks * query
