"""GPT-2 (Radford et al. 2019) and, by configuration, GPT (Radford et al. 2018) and GPT-3 (Brown et al. 2020,
arXiv 2005.14165).

Sizes: GPT-2 124M is the default; the others are (width, layers, heads) = (1024, 24, 16), (1280, 36, 20), (1600, 48, 25)
with feed_forward = 4 width.
GPT: `GptConfig(vocabulary_size=40478, max_length=512, norm="post", residual_scaling=False, position_std=0.02)`.
GPT-3: `GptConfig(max_length=2048, attention_pattern=("dense", "local"), band=256, ...)`.

Residual projections start smaller by 1/sqrt(2 L), as the GPT-2 paper says (section 2.3) and its released code does not.

Deviations: GPT-3's band is unpublished, so `band` is our choice, and its local attention is the causal band alone,
without the strided patterns of the Sparse Transformer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import NO_PENALTIES, Batch, ModelOutput, Penalties, TokenScores
from ctx_jax.layers import masks
from ctx_jax.layers.attention import Past, SelfAttention
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.embeddings import Embedding, in_dtype, padded
from ctx_jax.layers.feedforward import Activation, FeedForward
from ctx_jax.layers.linear import Linear, split_key
from ctx_jax.layers.losses import token_scores, vocabulary_logits
from ctx_jax.layers.norm import LayerNorm
from ctx_jax.layers.positions import counted
from ctx_jax.layers.stack import Stack
from ctx_jax.models import all_layers, check_length, validate
from ctx_jax.parallel.sharding import constrain

STD = 0.02
TASK_TOKENS = 3
"""Start, delimiter and extract: what fine-tuning puts around texts (GPT, section 3.3)."""


@dataclass(frozen=True)
class GptConfig:
    """The network; the defaults are GPT-2 124M."""

    vocabulary_size: int = 50257
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
    max_length: int = 1024
    """Longest sequence."""
    norm: Literal["pre", "post"] = "pre"
    """LayerNorm before each sublayer and after the last layer (GPT-2), or after each sublayer's sum (GPT)."""
    residual_scaling: bool = True
    """Whether the projections onto the residual stream start smaller by 1/sqrt(2 layers)."""
    position_std: float = 0.01
    """Standard deviation of the position table at the start (GPT 0.02)."""
    attention_pattern: tuple[Literal["dense", "local"], ...] = ("dense",)
    """Attention of the layers in turn; its length divides the number of layers. GPT-3: dense, local."""
    band: int = 256
    """How many keys a query of a local layer sees, itself included."""
    activation: Activation = "gelu_tanh"
    """gelu_tanh, gelu (by erf) or relu."""
    dropout: float = 0.1
    """Rate on the embedding and on what each sublayer adds."""
    attention_dropout: float = 0.1
    """Rate on the attention probabilities."""
    epsilon: float = 1e-5
    """Added to LayerNorm's variance."""
    classes: int | None = None
    """Classes of the head on each row's last token; None = no such head."""
    token_classes: int | None = None
    """Outputs of a head at every token: labels of tagging; 2 for the start and the end of an answer. None = no such
    head."""
    task_tokens: bool = False
    """Whether start, delimiter and extract have embeddings of their own, their ids behind the vocabulary's; they are
    never predicted. For fine-tuning with a tokenizer that has one special token for all, as GPT's and GPT-2's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters are fp32 always."""
    scan: bool = True
    """Scan over the layers (compiles once) or unroll them (may run faster)."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        validate(self)
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm {self.norm!r} is not known: choose pre or post")
        if not self.attention_pattern or not {"dense", "local"}.issuperset(self.attention_pattern):
            raise ValueError(f"attention_pattern {self.attention_pattern} is not known: choose from dense and local")
        if self.layers % len(self.attention_pattern):
            raise ValueError(
                f"attention_pattern of {len(self.attention_pattern)} does not divide layers {self.layers}: "
                f"choose layers in multiples of {len(self.attention_pattern)}"
            )

    def build(self) -> Gpt:
        return Gpt(self)


class Cache(NamedTuple):
    """What decoding needs of the tokens so far. Every row uses the same slots; padding in them is masked out."""

    past: list[list[Past]]
    """Of each layer of each period, [B, H, S, C], S the slots."""
    documents: jax.Array
    """[B, S] int32: packing ids; 0 = padding of the prompt, or not yet used."""
    used: jax.Array
    """Scalar int32: slots used, by padding too."""

    def rows(self, rows: jax.Array) -> Cache:
        """The cache of these rows."""
        past, documents = jax.tree.map(lambda x: x[rows], (self.past, self.documents))
        return Cache(past, documents, self.used)

    def drop(self, count: jax.Array) -> Cache:
        """The cache without its first slots, which hold padding: positions count the tokens that are none."""
        left = jnp.arange(self.documents.shape[1]) < self.documents.shape[1] - count
        documents = jnp.where(left, jnp.roll(self.documents, -count, axis=1), 0)
        return Cache(jax.tree.map(lambda x: jnp.roll(x, -count, axis=2), self.past), documents, self.used - count)


class Shared(NamedTuple):
    """What all layers see alike."""

    documents: jax.Array
    """[B, T], or [B, S] where one position is decoded: those of all slots, its own included."""
    collect: tuple[str, ...]
    slot: jax.Array | int = 0
    """Where one position is decoded, and is written."""


class Layer(nn.Module):
    """One decoder layer: x + f(LN(x)) (pre) or LN(x + f(x)) (post) for attention and feed-forward network."""

    config: GptConfig
    window: int | None

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(STD)
        output_init = nn.initializers.normal(STD / math.sqrt(2 * c.layers)) if c.residual_scaling else init
        self.attention = SelfAttention(
            c.width, c.heads, init, output_init, causal=True, window=self.window, dropout=c.attention_dropout
        )
        self.attention_norm = LayerNorm(c.width, c.epsilon)
        self.feed_forward = FeedForward(c.width, c.feed_forward, c.activation, init, output_init)
        self.feed_forward_norm = LayerNorm(c.width, c.epsilon)

    def __call__(
        self, x: jax.Array, past: Past | None, shared: Shared, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Any]]:
        """[B, T, D] -> [B, T, D] and what `collect` names. With a past, T is 1."""
        pre = self.config.norm == "pre"
        attention_key, first_key, second_key = split_key(key, 3)
        x, y = self.attention_norm.both(x) if pre else (x, x)
        collected: dict[str, Any] = {}
        if past is None:
            y, collected["attention"], collected["past"] = self.attention(
                y,
                shared.documents,
                attention_key,
                collect="attention" in shared.collect,
            )
        else:
            y, collected["past"] = self.attention.extend(y, past, shared.slot, self.mask(shared.documents, shared.slot))
        if pre:
            x, y = self.feed_forward_norm.both(x, y, self.config.dropout, first_key)
            x += dropout(self.feed_forward(y), self.config.dropout, second_key)
        else:
            x = self.attention_norm(x, y, self.config.dropout, first_key)
            x = self.feed_forward_norm(x, self.feed_forward(x), self.config.dropout, second_key)
        collected["layers"] = x
        return x, {name: collected[name] for name in shared.collect}

    def mask(self, documents: jax.Array, slot: jax.Array | int) -> jax.Array:
        """[B, 1, 1, S]: the slots [B, S] that the position in `slot`, the last one, sees."""
        own = jax.lax.dynamic_slice_in_dim(documents, slot, 1, axis=1)
        mask = masks.same_document(own, documents)
        if self.window is None:
            return mask
        positions = counted(documents)
        return mask & masks.causal(positions[:, -1:], positions, self.window)


class Period(nn.Module):
    """The layers of one period of the attention pattern: what the stack repeats."""

    config: GptConfig

    def setup(self) -> None:
        windows = [self.config.band if kind == "local" else None for kind in self.config.attention_pattern]
        self.blocks = [Layer(self.config, window) for window in windows]

    def __call__(
        self, x: jax.Array, past: list[Past] | None, shared: Shared, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """outputs [B, period, ...]; with the past of each layer, a list of theirs."""
        outputs = []
        pasts = [None] * len(self.blocks) if past is None else past
        for block, own, block_key in zip(self.blocks, pasts, split_key(key, len(self.blocks)), strict=True):
            x, output = block(x, own, shared, block_key)
            outputs.append(output)
        return x, outputs if past is not None else jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *outputs)


class Gpt(nn.Module):
    """A causal language model with tied logits."""

    config: GptConfig

    def setup(self) -> None:
        c = self.config
        rows = padded(c.vocabulary_size, c.vocabulary_multiple)
        self.tokens = Embedding(rows, c.width, nn.initializers.normal(STD))
        self.positions = Embedding(
            c.max_length, c.width, nn.initializers.normal(c.position_std), ("positions", "table")
        )
        if c.task_tokens:
            self.task_tokens = Embedding(TASK_TOKENS, c.width, nn.initializers.normal(STD), ("positions", "table"))
        self.stack = Stack(partial(Period, c), c.layers // len(c.attention_pattern), c.scan, c.remat)
        if c.norm == "pre":
            self.final_norm = LayerNorm(c.width, c.epsilon)
        init = nn.initializers.normal(STD)
        if c.classes is not None:
            self.classifier = Linear((c.width,), (c.classes,), ("width", "classes"), init, use_bias=False)
        if c.token_classes is not None:
            self.token_classifier = Linear((c.width,), (c.token_classes,), ("width", "classes"), init)

    def __call__(
        self, batch: Batch, memory: Any = None, *, key: jax.Array | None = None, collect: tuple[str, ...] = ()
    ) -> ModelOutput:
        """Reads `tokens`, `documents`, `positions`. Raises ValueError if the rows are longer than `max_length`.

        The last of the collected layers is the residual stream, `hidden` (GPT-2, GPT-3) its final LayerNorm. `pooled`
        [B, D], there with `classes`, is `hidden` at each row's last token that is no padding.
        """
        embedding, hidden, outputs = self.read(
            batch["tokens"], batch["positions"], Shared(batch["documents"], collect), key
        )
        pooled = None
        if self.config.classes is not None:
            pooled = jnp.take_along_axis(hidden, last_token(batch["documents"])[..., None], axis=1)[:, 0]
        layers, attention = all_layers(embedding, outputs), outputs.get("attention")
        return ModelOutput(hidden, pooled=pooled, layers=layers, attention=attention)

    def read(
        self, tokens: jax.Array, positions: jax.Array, shared: Shared, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """tokens, positions [B, T] -> embedding and hidden [B, T, D], outputs [B, L, ...]."""
        c = self.config
        check_length(tokens.shape[1], c.max_length)
        embedding_key, stack_key = split_key(key, 2)
        embedding = constrain(self.embed(tokens, positions, embedding_key), ("batch", "length", "activation"))
        x, outputs = self.stack(embedding, None, shared, stack_key)
        outputs = jax.tree.map(lambda x: x.reshape(x.shape[0], c.layers, *x.shape[3:]), outputs)
        return embedding, self.normalized(x), outputs

    def embed(self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None) -> jax.Array:
        """[B, T] -> [B, T, D]."""
        c = self.config
        if c.task_tokens:
            own = tokens - c.vocabulary_size
            text = self.tokens(jnp.minimum(tokens, c.vocabulary_size - 1))
            vectors = jnp.where((own >= 0)[..., None], self.task_tokens(jnp.clip(own, 0, TASK_TOKENS - 1)), text)
        else:
            vectors = self.tokens(tokens)
        return dropout(in_dtype(vectors + self.positions(positions), c.dtype), c.dropout, key)

    def normalized(self, x: jax.Array) -> jax.Array:
        """The residual stream [B, T, D] -> `hidden`."""
        return self.final_norm(x) if self.config.norm == "pre" else x

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D] at the predicted positions, targets and weights [B, K]."""
        size = self.config.vocabulary_size
        return token_scores(hidden, self.tokens.embedding, None, targets, weights, penalties, vocabulary_size=size)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32."""
        return vocabulary_logits(hidden, self.tokens.embedding, None)[..., : self.config.vocabulary_size]

    def classify(self, pooled: jax.Array) -> jax.Array:
        """[B, D] -> [B, classes] in fp32, without a bias (GPT, equation 3)."""
        return self.classifier(pooled.astype(jnp.promote_types(pooled.dtype, jnp.float32)))

    def classify_tokens(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., token_classes] in fp32."""
        return self.token_classifier(hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32)))

    def initialize(self, batch: Batch) -> None:
        output = self(batch)
        if output.pooled is not None:
            self.classify(output.pooled)
        if self.config.token_classes is not None:
            self.classify_tokens(output.hidden)

    def init_memory(self, batch_size: int) -> None:
        return None

    def start(self, batch: Batch, length: int) -> Cache:
        """Reads prompts (`tokens`, `documents` [B, T]) into a cache with `length` slots.

        Prompts of different lengths are padded to T on either side: positions count the tokens that are none
        (`documents` 0), so each row gives what it gives alone. The last token of each prompt is left to the first
        `decode`, so a prompt of one token is a row of padding here; `length` is T and what will be decoded.

        Raises ValueError if `length` exceeds `max_length` or is below T.
        """
        check_length(length, self.config.max_length)
        documents = batch["documents"]
        free = length - documents.shape[1]
        if free < 0:
            raise ValueError(f"length {length} is shorter than the prompts: choose {documents.shape[1]} or more")
        shared = Shared(documents, ("past",))
        _, _, outputs = self.read(batch["tokens"], counted(documents), shared, None)
        layers = [
            Past(*(jnp.pad(x[:, i], ((0, 0), (0, 0), (0, free), (0, 0))) for x in outputs["past"]))
            for i in range(self.config.layers)
        ]
        period = len(self.config.attention_pattern)
        periods = [layers[i : i + period] for i in range(0, len(layers), period)]
        return Cache(periods, jnp.pad(documents, ((0, 0), (0, free))), jnp.int32(documents.shape[1]))

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends tokens [B, 1], each to the last document of its row; returns the logits [B, V] of what comes next.

        A full cache does not grow: the caller makes room in `start`.
        """
        past, documents, used = cache
        document = jnp.maximum(jnp.take_along_axis(documents, last_token(documents), axis=1), 1)
        documents = jax.lax.dynamic_update_slice_in_dim(documents, document, used, axis=1)
        position = (documents != 0).sum(1, keepdims=True) - 1
        x = self.embed(tokens, position, None)
        x, outputs = self.stack(x, past, Shared(documents, ("past",), used), None)
        past = [[output["past"] for output in period] for period in outputs]
        return self.logits(self.normalized(x)[:, 0]), Cache(past, documents, used + 1)


def last_token(documents: jax.Array) -> jax.Array:
    """Packing ids [B, T] -> [B, 1]: the last place of each row that is no padding."""
    return jnp.where(documents != 0, jnp.arange(documents.shape[1]), 0).max(1, keepdims=True)
