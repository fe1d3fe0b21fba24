"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860; kimiyoung/transformer-xl's code).

Sizes, with the published evaluation settings (`dataclasses.replace` on the same parameters, `same_length=True`):
enwik8 base is the default (memory 2,100, clamp 820). WikiText-103 base: `TransformerXLConfig(vocabulary_size=267735,
width=410, layers=16, heads=10, feed_forward=2100, memory_length=150, cutoffs=(20000, 40000, 200000))` (memory 640,
clamp 400); large: `width=1024, layers=18, heads=16, feed_forward=4096, memory_length=384, embedding_divisor=4,
untie_biases=True` with the same vocabulary (memory 1,600, clamp 1,000), 285,205,322 parameters where the paper says
257M. One Billion Word: `embedding_divisor=4, untie_biases=True, tie_projections=False, project_equal=False,
cutoffs=(60000, 100000, 640000)`.

Follows the released code where it differs from the paper: positions are encoded as [sin | cos]; dropout falls on them
too, and on the last output; pre-LN normalises memory and window together, remembers its raw input and ends without a
LayerNorm. `same_length` is the PyTorch code's: a query sees `memory_length` keys, itself included.

Deviations: attention never crosses from one document to another, into the memory included (a reader that joins
documents gives the published behaviour), and an empty memory is masked out in every case; the head's columns for the
tails are in the TensorFlow code's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import NO_PENALTIES, Batch, Memory, ModelOutput, Penalties, TokenScores
from ctx_jax.layers.adaptive import AdaptiveVocabulary
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.feedforward import FeedForward
from ctx_jax.layers.linear import split_key
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
from ctx_jax.parallel.sharding import constrain

INIT = nn.initializers.normal(0.02)


@dataclass(frozen=True)
class TransformerXLConfig:
    """The network; the defaults are the enwik8 base model."""

    vocabulary_size: int = 204
    """Tokens, special ones included."""
    vocabulary_multiple: int = 128
    """Each token table is padded to a multiple of this; the padding is never predicted."""
    width: int = 512
    """Channels of the hidden states."""
    layers: int = 12
    """Transformer layers."""
    heads: int = 8
    """Attention heads; a divisor of the width."""
    feed_forward: int = 2048
    """Channels inside the feed-forward network."""
    memory_length: int = 512
    """Positions that each layer remembers of the windows before; 0 = no memory."""
    reuse_length: int | None = None
    """Only so many first positions of a window enter the memory (overlapping windows); None = all."""
    same_length: bool = False
    """Every query sees the nearest `memory_length` keys only, itself included (for evaluation)."""
    clamp_length: int | None = None
    """Distances beyond this look alike (for evaluation with a longer memory than in training); None = never."""
    norm: Literal["pre", "post"] = "post"
    """LayerNorm before each sublayer or after its sum."""
    untie_biases: bool = False
    """Whether each layer has its own u and v (wt103 large, lm1b)."""
    cutoffs: tuple[int, ...] = ()
    """First ids of the tails of an adaptive softmax; none = a plain softmax."""
    embedding_width: int | None = None
    """Channels of the head's token vectors; None = `width`."""
    embedding_divisor: int = 1
    """Each tail's token vectors are narrower than the band before by this factor."""
    tie_projections: bool = True
    """The tails' projections serve input and output (wt103), or are two (lm1b)."""
    project_equal: bool = True
    """With a divisor, project the head's vectors even if they are as wide as the model (wt103), or not (lm1b)."""
    dropout: float = 0.1
    """Rate on embedding, positions, what each sublayer adds, inside the feed-forward network, and on the output."""
    attention_dropout: float = 0.0
    """Rate on the attention probabilities."""
    epsilon: float = 1e-5
    """Added to LayerNorm's variance."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters are fp32 always."""
    scan: bool = True
    """Scan over the layers (compiles once) or unroll them (may run faster)."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        validate(self)
        validate_memory(self)
        if self.same_length and not self.memory_length:
            raise ValueError("same_length needs keys to see: choose memory_length 1 or more, or same_length False")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm {self.norm!r} is not known: choose pre or post")
        if any(low >= high for low, high in pairwise((0, *self.cutoffs, self.vocabulary_size))):
            raise ValueError(
                f"cutoffs {self.cutoffs} do not ascend inside the vocabulary: "
                f"choose ids from 1 to {self.vocabulary_size - 1}"
            )
        if self.embedding_divisor < 1:
            raise ValueError(f"embedding_divisor {self.embedding_divisor} is not a factor: choose 1 or more")
        if (self.embedding_width or self.width) < self.embedding_divisor ** len(self.cutoffs):
            raise ValueError(
                f"embedding_divisor {self.embedding_divisor} leaves no channel to the last of "
                f"{len(self.cutoffs)} tails: choose a smaller one"
            )

    def build(self) -> TransformerXL:
        return TransformerXL(self)


def validate_memory(config: Any) -> None:
    """Checks what the configs of models with relative positions and memory have in common."""
    if config.width % 2:
        raise ValueError(f"width {config.width} is odd: sines and cosines need an even one")
    if config.memory_length < 0:
        raise ValueError(f"memory_length {config.memory_length} is not a length: choose 0 (no memory) or more")
    for name in ("reuse_length", "clamp_length"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} is not a length: choose 1 or more, or None")


class Shared(NamedTuple):
    """What all layers see alike."""

    relative: jax.Array
    """[P, D]: encoded distances; none in generation, where the cache holds their projections."""
    visibility: Visibility
    biases: tuple[jax.Array, jax.Array] | None
    """u and v, [H, C], where they are not the layers' own."""
    slot: jax.Array | int
    """Place of the first query among the keys."""
    collect: tuple[str, ...]


class Layer(nn.Module):
    """Relative attention over memory and window, and a feed-forward network; post-LN or pre-LN."""

    config: TransformerXLConfig

    def setup(self) -> None:
        c = self.config
        self.attention = RelativeAttention(c.width, c.heads, INIT, biases=c.untie_biases, dropout=c.attention_dropout)
        self.attention_norm = LayerNorm(c.width, c.epsilon, gain)
        self.feed_forward = FeedForward(c.width, c.feed_forward, "relu", INIT, dropout=c.dropout)
        self.feed_forward_norm = LayerNorm(c.width, c.epsilon, gain)

    def __call__(
        self, x: jax.Array, carried: jax.Array | Cached, shared: Shared, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Any]]:
        """[B, T, D] -> [B, T, D] and what `collect` names. `carried` is the memory [B, M, D] or, in generation, this
        layer's part of the cache."""
        c, pre = self.config, self.config.norm == "pre"
        attention_key, first_key, inner_key, second_key = split_key(key, 4)
        collected: dict[str, Any] = {}
        if isinstance(carried, Cached):
            query = self.attention_norm(x) if pre else x
            collected["past"] = cached(self.attention.attendable(query))
            past = write(carried.past, collected["past"], shared.slot, axis=1)
            relative, places = carried.relative[0], jnp.full(x.shape[:2], shared.slot)
        else:
            source = jnp.concatenate([carried.astype(x.dtype), x], axis=1)
            source = self.attention_norm(source) if pre else source
            query = source[:, carried.shape[1] :]
            past = self.attention.attendable(source)
            relative, places = self.attention.position(shared.relative), None
            collected["past"], collected["relative"] = cached(past), relative[None]
            collected["memory"] = remember(carried, x, c.memory_length, c.reuse_length)
        y, collected["attention"] = self.attention(
            query,
            past,
            relative,
            shared.visibility,
            attention_key,
            biases=shared.biases,
            places=places,
            clamp=c.clamp_length if key is None else None,  # dropout of what encodes them tells equal distances apart
            collect="attention" in shared.collect,
        )
        if pre:
            x, y = self.feed_forward_norm.both(x, y, c.dropout, first_key)
            x += dropout(self.feed_forward(y, inner_key), c.dropout, second_key)
        else:
            x = self.attention_norm(x, y, c.dropout, first_key)
            x = self.feed_forward_norm(x, self.feed_forward(x, inner_key), c.dropout, second_key)
        collected["layers"] = x
        return x, {name: collected[name] for name in shared.collect}


def gain(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """LayerNorm's gain at the start (code): N(1, 0.02)."""
    return 1.0 + INIT(key, shape, dtype)


class TransformerXL(nn.Module):
    """A causal language model with a memory of the windows before, and tied logits."""

    config: TransformerXLConfig

    def setup(self) -> None:
        c = self.config
        self.vocabulary = AdaptiveVocabulary(
            c.vocabulary_size,
            c.vocabulary_multiple,
            c.width,
            c.embedding_width or c.width,
            c.cutoffs,
            c.embedding_divisor,
            c.tie_projections,
            c.project_equal,
            INIT,
            nn.initializers.normal(0.01),
            c.dtype,
        )
        if not c.untie_biases:
            head, axes = (c.heads, c.width // c.heads), ("heads", "channels")
            self.content_bias = parameter(self, "content_bias", INIT, head, axes)
            self.position_bias = parameter(self, "position_bias", INIT, head, axes)
        self.stack = Stack(partial(Layer, c), c.layers, c.scan, c.remat)

    def __call__(
        self,
        batch: Batch,
        memory: Memory | None = None,
        *,
        key: jax.Array | None = None,
        collect: tuple[str, ...] = (),
    ) -> ModelOutput:
        """Reads `tokens` and `documents`. The memory may be of any length, None is an empty one; the new one has
        `memory_length` positions, and is None if that is 0.

        The last of the collected layers is `hidden` before its dropout.
        """
        c = self.config
        documents = batch["documents"]
        if memory is None:
            memory = empty_memory(len(documents), c.layers, 0, c.width, jnp.dtype(c.dtype))
        remembered = ("memory",) if c.memory_length else ()
        embedding, hidden, outputs = self.read(batch["tokens"], documents, memory, (*collect, *remembered), key)
        new = None
        if remembered:
            new = Memory(outputs["memory"], remember(memory.documents, documents, c.memory_length, c.reuse_length))
        return ModelOutput(hidden, new, layers=all_layers(embedding, outputs), attention=outputs.get("attention"))

    def read(
        self,
        tokens: jax.Array,
        documents: jax.Array,
        memory: Memory,
        collect: tuple[str, ...],
        key: jax.Array | None,
        causal: bool = True,
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """tokens, documents [B, T] -> embedding and hidden [B, T, D], and the layers' outputs, [B, L, ...].

        `causal` False encodes distances to later keys too, which are not seen.
        """
        c = self.config
        embedding_key, position_key, stack_key, output_key = split_key(key, 4)
        embedding = self.embed(tokens, embedding_key)
        key_documents = jnp.concatenate([memory.documents, documents], axis=1)
        first = memory.documents.shape[1]
        places = first + jnp.arange(documents.shape[1])
        n = distances(documents.shape[1], key_documents.shape[1], causal=causal, clamp=c.clamp_length)
        shared = Shared(
            dropout(encode(n, c.width, embedding.dtype), c.dropout, position_key),
            self.visibility(documents, key_documents, places),
            self.biases(),
            first,
            collect,
        )
        x, outputs = self.stack(embedding, memory.hidden, shared, stack_key)
        return embedding, dropout(x, c.dropout, output_key), outputs

    def embed(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """[B, T] -> [B, T, D]."""
        x = self.vocabulary(tokens) * math.sqrt(self.config.width)
        return constrain(dropout(x, self.config.dropout, key), ("batch", "length", "activation"))

    def visibility(self, documents: jax.Array, key_documents: jax.Array, places: jax.Array) -> Visibility:
        """Queries of those documents [B, T] and places [T] among keys of those documents [B, S]."""
        c = self.config
        lowest = places - (c.memory_length - 1) if c.same_length else jnp.zeros_like(places)
        ranks = jnp.arange(key_documents.shape[1])
        return Visibility(documents, key_documents, ranks[None], lowest[None], places[None])

    def biases(self) -> tuple[jax.Array, jax.Array] | None:
        return None if self.config.untie_biases else (self.content_bias, self.position_bias)

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D] at the predicted positions, targets and weights [B, K]."""
        return self.vocabulary.score(hidden, targets, weights, penalties)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32; log-probabilities where the softmax is adaptive."""
        return self.vocabulary.logits(hidden)

    def initialize(self, batch: Batch) -> None:
        self.logits(self(batch).hidden[:, :1])

    def init_memory(self, batch_size: int) -> Memory | None:
        """An empty memory, or None if `memory_length` is 0."""
        c = self.config
        if not c.memory_length:
            return None
        return empty_memory(batch_size, c.layers, c.memory_length, c.width, jnp.dtype(c.dtype))

    def start(self, batch: Batch, length: int) -> Cache:
        """Reads prompts (`tokens`, `documents` [B, T]) into a window of `length` slots.

        Prompts of different lengths are padded to T on either side (`documents` 0), and each row gives what it gives
        alone. The last token of each prompt is left to the first `decode`, so a prompt of one token is a row of padding
        here; `length` is T and what will be decoded. The window is one pass: `memory_length` limits it only with
        `same_length`. Raises ValueError if `length` is below T.
        """
        c = self.config
        tokens, documents = slots(batch, length)
        memory = empty_memory(len(documents), c.layers, 0, c.width, jnp.dtype(c.dtype))
        _, _, outputs = self.read(tokens, documents, memory, ("past", "relative"), None, causal=False)
        return Cache(outputs["past"], outputs["relative"], documents, jnp.int32(batch["documents"].shape[1]))

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends tokens [B, 1], each to the last document of its row; returns the logits [B, V] of what comes next.

        A full window does not grow: the caller makes room in `start`.
        """
        slot, cache = cache.used, cache.take()
        documents = jax.lax.dynamic_slice_in_dim(cache.documents, slot, 1, axis=1)
        visibility = self.visibility(documents, cache.documents, slot[None])
        x = self.embed(tokens, None)
        shared = Shared(x[0, :0], visibility, self.biases(), slot, ("past",))
        x, outputs = self.stack(x, Cached(cache.past, cache.relative), shared, None)
        return self.logits(x[:, 0]), cache._replace(past=write(cache.past, outputs["past"], slot, axis=2))
