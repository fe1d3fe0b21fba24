"""BERT (Devlin et al. 2018, arXiv 1810.04805) and, by configuration, RoBERTa and DistilBERT.

Sizes: base is the default, large `BertConfig(width=1024, layers=24, heads=16, feed_forward=4096)`.
RoBERTa (Liu et al. 2019, arXiv 1907.11692): `BertConfig(vocabulary_size=50265, position_offset=2, segments=0,
pooler=False, classes=None, epsilon=1e-5)`.
DistilBERT (Sanh et al. 2019, arXiv 1910.01108): `BertConfig(layers=6, segments=0, pooler=False, classes=None)`.

Follows the released code where it differs from the paper: LayerNorm and dropout after the embedding, a dense layer,
activation and LayerNorm before the tied decoder, its bias of one value per token.

Deviations: none in the network. Truncated normals are TensorFlow's: N(0, 0.02) cut at two standard deviations and not
rescaled, so that the parameters' standard deviation is 0.0176 (RoBERTa's code draws whole normals). RoBERTa's positions
are `position_offset` + place in the row, with padding counted; so they are fairseq's where padding is on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import NO_PENALTIES, Batch, ModelOutput, Penalties, TokenScores
from ctx_jax.layers.attention import SelfAttention
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.embeddings import Embedding, in_dtype, padded
from ctx_jax.layers.feedforward import ACTIVATIONS, Activation, FeedForward
from ctx_jax.layers.linear import Linear, split_key
from ctx_jax.layers.losses import token_scores, vocabulary_logits
from ctx_jax.layers.norm import LayerNorm
from ctx_jax.layers.parameters import parameter
from ctx_jax.layers.stack import Stack
from ctx_jax.models import all_layers, check_length, validate
from ctx_jax.parallel.sharding import constrain

INIT = nn.initializers.truncated_normal(0.02)
POOLER_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


@dataclass(frozen=True)
class BertConfig:
    """The network; the defaults are BERT base."""

    vocabulary_size: int = 30522
    """Tokens, special ones included."""
    vocabulary_multiple: int = 128
    """The token table is padded to a multiple of this; the padding is never predicted."""
    width: int = 768
    """Channels of the hidden states."""
    layers: int = 12
    """Transformer layers."""
    heads: int = 12
    """Attention heads; a divisor of the width."""
    feed_forward: int = 3072
    """Channels inside the feed-forward network."""
    max_length: int = 512
    """Longest sequence."""
    position_offset: int = 0
    """Row of the position table that the first token takes (RoBERTa 2)."""
    segments: int = 2
    """Rows of the segment table; 0 = no segment embeddings (RoBERTa, DistilBERT)."""
    activation: Activation = "gelu"
    """gelu (by erf: the 2018 release), gelu_tanh (the released code at its head) or relu."""
    dropout: float = 0.1
    """Rate on the embedding and on what each sublayer adds."""
    attention_dropout: float = 0.1
    """Rate on the attention probabilities."""
    epsilon: float = 1e-12
    """Added to LayerNorm's variance (RoBERTa 1e-5)."""
    pooler: bool = True
    """Whether the first token goes through a dense layer and an activation, for `classify`."""
    pooler_activation: Literal["tanh", "relu"] = "tanh"
    """tanh, or relu (DistilBERT's classifiers)."""
    classes: int | None = 2
    """Classes of the head on the pooled vector (2 = next sentence or sentence order); None = no such head."""
    token_classes: int | None = None
    """Outputs of a head at every token: labels of tagging; 2 for the start and the end of an answer. None = no such
    head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters are fp32 always."""
    scan: bool = True
    """Scan over the layers (compiles once) or unroll them (may run faster)."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        validate(self)
        if self.pooler_activation not in POOLER_ACTIVATIONS:
            raise ValueError(f"pooler_activation {self.pooler_activation!r} is not known: choose tanh or relu")
        if self.classes is not None and not self.pooler:
            raise ValueError(f"classes {self.classes} need the pooled vector: choose pooler True or classes None")

    def build(self) -> Bert:
        return Bert(self)


class Shared(NamedTuple):
    """What all layers see alike."""

    documents: jax.Array
    collect: tuple[str, ...]


class Layer(nn.Module):
    """Post-LN: x = LN(x + attention(x)), x = LN(x + feed_forward(x)) (Vaswani et al. 2017, section 3.1)."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.attention = SelfAttention(c.width, c.heads, INIT, dropout=c.attention_dropout)
        self.attention_norm = LayerNorm(c.width, c.epsilon)
        self.feed_forward = FeedForward(c.width, c.feed_forward, c.activation, INIT)
        self.feed_forward_norm = LayerNorm(c.width, c.epsilon)

    def __call__(
        self, x: jax.Array, per_layer: None, shared: Shared, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, T, D] -> [B, T, D] and what `collect` names."""
        attention_key, first_key, second_key = split_key(key, 3)
        y, probabilities, _ = self.attention(x, shared.documents, attention_key, collect="attention" in shared.collect)
        x = self.attention_norm(x, y, self.config.dropout, first_key)
        x = self.feed_forward_norm(x, self.feed_forward(x), self.config.dropout, second_key)
        collected = {"layers": x, "attention": probabilities}
        return x, {name: collected[name] for name in shared.collect}


class Head(nn.Module):
    """What stands between a hidden state and the tied decoder, and the decoder's bias."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.dense = Linear((c.width,), (c.width,), ("width", "activation"), INIT)
        self.norm = LayerNorm(c.width, c.epsilon)
        rows = padded(c.vocabulary_size, c.vocabulary_multiple)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (rows,), ("vocabulary",))

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., D] -> [..., D], and the bias [Vpad]."""
        return self.norm(ACTIVATIONS[self.config.activation](self.dense(hidden))), self.bias


class Bert(nn.Module):
    """A bidirectional encoder with a masked-LM head and a head on the first token."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.tokens = Embedding(padded(c.vocabulary_size, c.vocabulary_multiple), c.width, INIT)
        self.positions = Embedding(c.max_length + c.position_offset, c.width, INIT, ("positions", "table"))
        if c.segments:
            self.segments = Embedding(c.segments, c.width, INIT, ("segments", "table"))
        self.embedding_norm = LayerNorm(c.width, c.epsilon)
        self.stack = Stack(partial(Layer, c), c.layers, c.scan, c.remat)
        self.head = Head(c)
        if c.pooler:
            self.pooler = Linear((c.width,), (c.width,), ("width", "activation"), INIT)
        if c.classes is not None:
            self.classifier = Linear((c.width,), (c.classes,), ("width", "classes"), INIT)
        if c.token_classes is not None:
            self.token_classifier = Linear((c.width,), (c.token_classes,), ("width", "classes"), INIT)

    def __call__(
        self, batch: Batch, memory: Any = None, *, key: jax.Array | None = None, collect: tuple[str, ...] = ()
    ) -> ModelOutput:
        """Reads `tokens`, `documents`, `positions` and, where the model has them, `segments` (absent: all 0).

        `pooled` [B, D] is of each row's first token. Raises ValueError if the rows are longer than `max_length`.
        """
        c = self.config
        check_length(batch["tokens"].shape[1], c.max_length)
        embedding_key, stack_key = split_key(key, 2)
        x = self.tokens(batch["tokens"]) + self.positions(batch["positions"] + c.position_offset)
        if c.segments:
            x += self.segments(batch.get("segments", jnp.zeros_like(batch["tokens"])))
        x = dropout(in_dtype(self.embedding_norm(x), c.dtype), c.dropout, embedding_key)
        embedding = constrain(x, ("batch", "length", "activation"))
        x, outputs = self.stack(embedding, None, Shared(batch["documents"], collect), stack_key)
        pooled = POOLER_ACTIVATIONS[c.pooler_activation](self.pooler(x[:, 0])) if c.pooler else None
        return ModelOutput(x, pooled=pooled, layers=all_layers(embedding, outputs), attention=outputs.get("attention"))

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D] at the predicted positions, targets and weights [B, K]."""
        hidden, bias = self.head(hidden)
        size = self.config.vocabulary_size
        return token_scores(hidden, self.tokens.embedding, bias, targets, weights, penalties, vocabulary_size=size)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32."""
        hidden, bias = self.head(hidden)
        return vocabulary_logits(hidden, self.tokens.embedding, bias)[..., : self.config.vocabulary_size]

    def classify(self, pooled: jax.Array) -> jax.Array:
        """[B, D] -> [B, classes] in fp32."""
        return self.classifier(pooled.astype(jnp.promote_types(pooled.dtype, jnp.float32)))

    def classify_tokens(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., token_classes] in fp32."""
        return self.token_classifier(hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32)))

    def initialize(self, batch: Batch) -> None:
        output = self(batch)
        self.logits(output.hidden[:, :1])
        if output.pooled is not None and self.config.classes is not None:
            self.classify(output.pooled)
        if self.config.token_classes is not None:
            self.classify_tokens(output.hidden)

    def init_memory(self, batch_size: int) -> None:
        return None
