"""XLNet (Yang et al. 2019, arXiv 1906.08237; zihangdai/xlnet's code).

Sizes: base is the default; large `XLNetConfig(width=1024, layers=24, heads=16, feed_forward=4096)`. Fine-tuning:
`dataclasses.replace(config, memory_length=0, pooler=True, classes=2)` on the same parameters.

Pretraining: a prepared batch (objectives/permutation.py) has, beside `tokens` and `documents`,

    ranks             [B, T] int32   places in the factorisation order, compared over the whole row: the content stream
                                     of i sees j iff ranks[j] <= ranks[i], its query stream iff ranks[j] < ranks[i]
    target_positions  [B, K] int32   the only places where there is a query stream

and, where they apply, `segments` and `reversed`. Equal ranks see each other: so are the positions that are not
predicted. A block of positions whose ranks are all higher than another's sees it whole and is not seen by it; the first
half of the window must be such a block, because what the memory takes of it may not know the second. Without `ranks`
there is only the content stream, and every position sees all others of its document.

Follows the released code where it differs from the paper: GELU by tanh, LayerNorm's epsilon of 1e-12, dropout on the
encoded positions and on the last output.

Deviations: attention never crosses from one document to another, into the memory included; positions share their
dropout over rows that are read in the same direction; the query stream's first vector starts like the other embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import NO_PENALTIES, Batch, Memory, ModelOutput, Penalties, TokenScores
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.embeddings import Embedding, in_dtype, padded
from ctx_jax.layers.feedforward import Activation, FeedForward
from ctx_jax.layers.linear import Linear, split_key
from ctx_jax.layers.losses import token_scores, vocabulary_logits
from ctx_jax.layers.masks import Visibility
from ctx_jax.layers.norm import LayerNorm
from ctx_jax.layers.parameters import parameter
from ctx_jax.layers.relative import (
    Cache,
    Cached,
    RelativeAttention,
    cached,
    distances,
    empty_memory,
    encode,
    remember,
    slots,
    write,
)
from ctx_jax.layers.stack import Stack
from ctx_jax.models import all_layers, validate
from ctx_jax.models.transformer_xl import validate_memory
from ctx_jax.parallel.sharding import constrain

INIT = nn.initializers.normal(0.02)
BELOW = -(2**31)
"""A rank below all others: the memory's."""


@dataclass(frozen=True)
class XLNetConfig:
    """The network; the defaults are XLNet base."""

    vocabulary_size: int = 32000
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
    memory_length: int = 384
    """Positions that each layer remembers of the windows before; 0 = no memory (fine-tuning)."""
    reuse_length: int | None = 256
    """Only so many first positions of a window enter the memory, for the next window starts there; None = all."""
    clamp_length: int | None = None
    """Distances beyond this look alike; None = never."""
    causal: bool = False
    """Without permutation, a position sees the earlier ones only (the code's attention type "uni")."""
    activation: Activation = "gelu_tanh"
    """gelu_tanh (the released code), gelu (by erf) or relu."""
    dropout: float = 0.1
    """Rate on embedding, positions, what each sublayer adds, inside the feed-forward network, and on the output."""
    attention_dropout: float = 0.1
    """Rate on the attention probabilities."""
    epsilon: float = 1e-12
    """Added to LayerNorm's variance."""
    pooler: bool = False
    """Whether the last token goes through a dense layer and tanh, for `classify`."""
    classes: int | None = None
    """Classes of the head on the pooled vector; None = no such head."""
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
        validate_memory(self)
        if self.classes is not None and not self.pooler:
            raise ValueError(f"classes {self.classes} need the pooled vector: choose pooler True or classes None")

    def build(self) -> XLNet:
        return XLNet(self)


class Shared(NamedTuple):
    """What all layers see alike. The queries are the content stream's, then those of the query stream."""

    relative: jax.Array
    """[1, P, D], or [2, P, D] with `reversed`: encoded distances, and those of rows that are read backwards."""
    reversed: jax.Array | None
    """[B] bool"""
    content: int
    """Positions of the content stream."""
    visibility: Visibility
    segments: tuple[jax.Array, jax.Array] | None
    """Those of the queries and of the keys; None = all alike."""
    places: jax.Array | None
    """Where the last queries stand among the keys, [B, K]; those before are the last of them."""
    slot: jax.Array | int
    """Place of the first content query among the keys."""
    collect: tuple[str, ...]
    apart: bool = False
    """Whether the streams are computed apart, as in the last layer, whose content stream pretraining does not need: the
    compiler leaves it out."""


class Layer(nn.Module):
    """Relative attention over memory and window, and a feed-forward network; post-LN. Both streams go through it as one
    sequence, for they differ only in what they see."""

    config: XLNetConfig

    def setup(self) -> None:
        c = self.config
        self.attention = RelativeAttention(c.width, c.heads, INIT, segments=True, dropout=c.attention_dropout)
        self.attention_norm = LayerNorm(c.width, c.epsilon)
        self.feed_forward = FeedForward(c.width, c.feed_forward, c.activation, INIT, dropout=c.dropout)
        self.feed_forward_norm = LayerNorm(c.width, c.epsilon)

    def __call__(
        self, x: jax.Array, carried: jax.Array | Cached, shared: Shared, key: jax.Array | None
    ) -> tuple[Any, dict[str, Any]]:
        """Content and query stream [B, T + K, D] -> the same (two arrays if `apart`), and what `collect` names,
        of the content stream. `carried` is the memory [B, M, D] or, in generation, this layer's part of the cache."""
        c = self.config
        h = x[:, : shared.content]
        collected: dict[str, Any] = {}
        if isinstance(carried, Cached):
            collected["past"] = cached(self.attention.attendable(h))
            past = write(carried.past, collected["past"], shared.slot, axis=1)
            relative = carried.relative[0]
        else:
            past = self.attention.attendable(jnp.concatenate([carried.astype(h.dtype), h], axis=1))
            relative = self.attention.position(shared.relative)
            collected["past"], collected["relative"] = cached(past), relative[:1]
            if shared.reversed is None:
                relative = relative[0]
            collected["memory"] = remember(carried, h, c.memory_length, c.reuse_length)

        direction = None if shared.reversed is None else shared.reversed.astype(jnp.int32)

        def queried(own: slice, places: jax.Array | None, key: jax.Array | None) -> tuple[jax.Array, Any]:
            attention_key, first_key, inner_key, second_key = split_key(key, 4)
            sees, segments = shared.visibility, shared.segments
            y, probabilities = self.attention(
                x[:, own],
                past,
                relative,
                sees._replace(query_documents=sees.query_documents[:, own], highest=sees.highest[:, own]),
                attention_key,
                direction=direction,
                places=places,
                segments=segments and (segments[0][:, own], segments[1]),
                collect="attention" in shared.collect,
            )
            y = self.attention_norm(x[:, own], y, c.dropout, first_key)
            return self.feed_forward_norm(y, self.feed_forward(y, inner_key), c.dropout, second_key), probabilities

        if shared.apart:
            content_key, query_key = split_key(key, 2)
            h, probabilities = queried(slice(0, shared.content), None, content_key)
            g, _ = queried(slice(shared.content, None), shared.places, query_key)
            y: Any = (h, g)
        else:
            y, probabilities = queried(slice(None), shared.places, key)
            h = y[:, : shared.content]
        collected["attention"] = None if probabilities is None else probabilities[:, :, : shared.content]
        collected["layers"] = h
        return y, {name: collected[name] for name in shared.collect}


class XLNet(nn.Module):
    """A permutation language model with a memory of the windows before, and tied logits."""

    config: XLNetConfig

    def setup(self) -> None:
        c = self.config
        rows = padded(c.vocabulary_size, c.vocabulary_multiple)
        self.tokens = Embedding(rows, c.width, INIT)
        self.query_embedding = parameter(self, "query_embedding", INIT, (c.width,), ("norm",))
        self.head_bias = parameter(self, "head_bias", nn.initializers.zeros, (rows,), ("vocabulary",))
        self.stack = Stack(partial(Layer, c), c.layers, c.scan, c.remat)
        if c.pooler:
            self.pooler = Linear((c.width,), (c.width,), ("width", "activation"), INIT)
        if c.classes is not None:
            self.classifier = Linear((c.width,), (c.classes,), ("width", "classes"), INIT)
        if c.token_classes is not None:
            self.token_classifier = Linear((c.width,), (c.token_classes,), ("width", "classes"), INIT)

    def __call__(
        self,
        batch: Batch,
        memory: Memory | None = None,
        *,
        key: jax.Array | None = None,
        collect: tuple[str, ...] = (),
    ) -> ModelOutput:
        """Reads `tokens`, `documents` and, if present, `segments`, `reversed` and `ranks` with `target_positions`.

        The memory may be of any length, None is an empty one; the new one has `memory_length` positions, and is None if
        that is 0. `query` is there with `ranks`. `pooled` is of each row's last position: pad on the left. `layers` and
        `attention` are the content stream's. Raises ValueError if a causal model is given ranks.
        """
        c = self.config
        tokens, documents = batch["tokens"], batch["documents"]
        rows, length = tokens.shape
        if memory is None:
            memory = empty_memory(rows, c.layers, 0, c.width, jnp.dtype(c.dtype))
        first = memory.documents.shape[1]
        if "ranks" in batch and c.causal:
            raise ValueError("a causal XLNet cannot read a permuted batch: choose causal False or a causal objective")
        ranks = batch["ranks"] if "ranks" in batch else self.plain_ranks(length)
        segments = batch.get("segments", jnp.zeros_like(tokens))
        content_key, query_key, position_key, stack_key, hidden_key, output_key, pooled_key = split_key(key, 7)

        key_documents = jnp.concatenate([memory.documents, documents], axis=1)
        key_ranks = jnp.pad(ranks, ((0, 0), (first, 0)), constant_values=BELOW)
        key_segments = jnp.pad(segments, ((0, 0), (first, 0)))
        embedding = x = self.embed(tokens, content_key)
        queries, places = (documents, ranks, segments), None
        if "ranks" in batch:
            targets = batch["target_positions"]
            own_documents, own_ranks, own_segments = (
                jnp.take_along_axis(x, targets, axis=1) for x in (documents, ranks, segments)
            )
            # its queries do not see their own place
            of_targets, places = (own_documents, own_ranks - 1, own_segments), first + targets
            queries = tuple(jnp.concatenate(both, 1) for both in zip(queries, of_targets, strict=True))
            x = jnp.concatenate([x, dropout(self.queries(*targets.shape), c.dropout, query_key)], axis=1)

        n = distances(length, first + length, causal=c.causal, clamp=c.clamp_length)
        directions = jnp.stack([n, -n] if "reversed" in batch else [n])
        shared = Shared(
            dropout(encode(directions, c.width, x.dtype), c.dropout, position_key),
            batch.get("reversed"),
            length,
            Visibility(queries[0], key_documents, key_ranks, jnp.full((1, 1), BELOW), queries[1]),
            (queries[2], key_segments),
            places,
            first,
            (*collect, "memory") if c.memory_length else collect,
        )
        last = None if places is None else shared._replace(apart=True)
        x, outputs = self.stack(x, memory.hidden, shared, stack_key, last)
        h, g = (x, None) if last is None else x

        new = pooled = None
        if c.memory_length:
            new = Memory(outputs["memory"], remember(memory.documents, documents, c.memory_length, c.reuse_length))
        hidden = dropout(h, c.dropout, hidden_key)
        if c.pooler:
            pooled = dropout(jnp.tanh(self.pooler(hidden[:, -1])), c.dropout, pooled_key)
        return ModelOutput(
            hidden,
            new,
            pooled,
            query=None if g is None else dropout(g, c.dropout, output_key),
            layers=all_layers(embedding, outputs),
            attention=outputs.get("attention"),
        )

    def plain_ranks(self, length: int) -> jax.Array:
        """Ranks [1, T] without permutation: in order if the model is causal, else all equal."""
        return jnp.arange(length)[None] if self.config.causal else jnp.zeros((1, length), jnp.int32)

    def embed(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """[B, T] -> [B, T, D], where the content stream starts."""
        x = dropout(in_dtype(self.tokens(tokens), self.config.dtype), self.config.dropout, key)
        return constrain(x, ("batch", "length", "activation"))

    def queries(self, rows: int, count: int) -> jax.Array:
        """[B, K, D], where the query stream starts: one vector."""
        x = in_dtype(self.query_embedding, self.config.dtype)
        return constrain(jnp.broadcast_to(x, (rows, count, len(x))), ("batch", "length", "activation"))

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D] at the predicted positions, targets and weights [B, K]."""
        table, size = self.tokens.embedding, self.config.vocabulary_size
        return token_scores(hidden, table, self.head_bias, targets, weights, penalties, vocabulary_size=size)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32."""
        return vocabulary_logits(hidden, self.tokens.embedding, self.head_bias)[..., : self.config.vocabulary_size]

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

    def init_memory(self, batch_size: int) -> Memory | None:
        """An empty memory, or None if `memory_length` is 0."""
        c = self.config
        if not c.memory_length:
            return None
        return empty_memory(batch_size, c.layers, c.memory_length, c.width, jnp.dtype(c.dtype))

    def start(self, batch: Batch, length: int) -> Cache:
        """Reads prompts (`tokens`, `documents` [B, T]) into a window of `length` slots and one that is only queried.

        The prompt is context: its tokens see each other (unless the model is causal). What `decode` reads follows in
        the factorisation order as in the text. Prompts of different lengths are padded to T on either side (`documents`
        0), and each row gives what it gives alone; the last token of each is left to the first `decode`, so a prompt of
        one token is a row of padding here. Raises ValueError if `length` is below T.
        """
        c = self.config
        tokens, documents = slots(batch, length + 1)
        count = documents.shape[1]
        ranks = self.plain_ranks(count)
        visibility = Visibility(documents, documents, ranks, jnp.full((1, 1), BELOW), ranks)
        h = self.embed(tokens, None)
        relative = encode(distances(count, count, clamp=c.clamp_length), c.width, h.dtype)[None]
        memory = empty_memory(len(tokens), c.layers, 0, c.width, h.dtype)
        shared = Shared(relative, None, count, visibility, None, None, 0, ("past", "relative"))
        _, outputs = self.stack(h, memory.hidden, shared, None)
        return Cache(outputs["past"], outputs["relative"], documents, jnp.int32(batch["documents"].shape[1]))

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends tokens [B, 1], each to the last document of its row, to the content; the query stream at the place
        after it gives the logits [B, V] of what comes next.

        A full window does not grow: the caller makes room in `start`.
        """
        slot, cache = cache.used, cache.take()
        document = jax.lax.dynamic_slice_in_dim(cache.documents, slot, 1, axis=1)
        ranks = jnp.arange(cache.documents.shape[1])[None]
        both = jnp.concatenate([document, document], axis=1)
        visibility = Visibility(both, cache.documents, ranks, jnp.full((1, 1), BELOW), slot[None, None])
        places = jnp.broadcast_to(slot, tokens.shape) + jnp.arange(2)
        x = jnp.concatenate([self.embed(tokens, None), self.queries(*tokens.shape)], axis=1)
        shared = Shared(x[:1, :0], None, 1, visibility, None, places, slot, ("past",))
        x, outputs = self.stack(x, Cached(cache.past, cache.relative), shared, None)
        return self.logits(x[:, 1]), cache._replace(past=write(cache.past, outputs["past"], slot, axis=2))
