"""Scaled dot-product attention (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.kernels import chose, flash, splash
from ctx_jax.layers import masks
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.linear import Linear, side_by_side


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of fp32 scores, where the mask allows; a row that allows nothing is 0, and so is its
    gradient."""
    return jax.nn.softmax(scores, axis=-1, where=mask)


def attention_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """query [B, T, H, C], key [B, S, H, C] -> q k / sqrt(C), [B, H, T, S] in fp32 (float64 of float64)."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("bthc,bshc->bhts", query, key, preferred_element_type=wide) * query.shape[-1] ** -0.5


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_documents: jax.Array,
    key_documents: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of query [B, T, H, C] to key and value [B, S, H, C] of the same document -> [B, T, H, C].

    The documents [B, T] and [B, S] are packing ids, 0 = padding; the queries are the last T of the S places. `causal`
    hides what comes later, `window` (causal only) all but the nearest keys. `rate` is the dropout on the probabilities.

    Also returns the probabilities before dropout, [B, H, T, S] in fp32.
    """
    length, source = query.shape[1], key.shape[1]
    mask = masks.same_document(query_documents, key_documents)
    if causal:
        mask &= masks.causal(jnp.arange(source - length, source)[None], jnp.arange(source)[None], window)
    probabilities = masked_softmax(attention_scores(query, key), mask)
    dropped = dropout(probabilities, rate, dropout_key).astype(value.dtype)
    return jnp.einsum("bhts,bshc->bthc", dropped, value), probabilities


def self_attention(
    packed: jax.Array,
    documents: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    collect: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """`attention` of queries, keys and values [B, T, H, 3, C] of the same places. If the probabilities are not to be
    collected, a kernel does the work where there is one, and they may be None."""
    query, key, value = (packed[..., n, :] for n in range(3))
    kernel = None if collect else kernel_for(query, key, rate > 0 and dropout_key is not None)
    if kernel == "splash":
        return splash.attention(query, key, value, documents, causal=causal, window=window), None
    if kernel == "flash":
        return flash.self_attention(packed, visible(documents, causal, window), rate, dropout_key), None
    return attention(
        query, key, value, documents, documents, causal=causal, window=window, rate=rate, dropout_key=dropout_key
    )


def kernel_for(query: jax.Array, key: jax.Array, random: bool) -> Literal["flash", "splash"] | None:
    """Which kernel does it, if one does; `random` says that there is dropout. Notes it for `kernels.paths`."""
    on_tpu = jax.default_backend() == "tpu"
    obstacle = splash.obstacle(query, key, random) if on_tpu else flash.obstacle(query, key)
    if obstacle is not None:
        chose("attention", f"XLA: {obstacle}")
        return None
    chose("attention", "splash attention" if on_tpu else "Pallas kernel")
    return "splash" if on_tpu else "flash"


def visible(documents: jax.Array, causal: bool, window: int | None) -> masks.Visibility:
    """Who sees whom, for the kernel."""
    length = documents.shape[1]
    ranks = jnp.arange(length)[None] if causal else jnp.zeros((1, length), jnp.int32)
    lowest = ranks - (window or length) + 1 if causal else ranks
    return masks.Visibility(documents, documents, ranks, lowest, ranks)


class Past(NamedTuple):
    """What a decoder's earlier positions have left for one layer."""

    keys: jax.Array
    """[B, S, H, C]; those of `SelfAttention` are [B, H, S, C], as the products of one query want them."""
    values: jax.Array
    """Like keys."""


class SelfAttention(nn.Module):
    """Projections to `heads` heads, attention, projection back."""

    width: int
    heads: int
    kernel_init: Callable[..., jax.Array]
    output_init: Callable[..., jax.Array] | None = None
    """Init of the projection back; `kernel_init` if None."""
    causal: bool = False
    window: int | None = None
    """How many keys a causal query sees, itself included; None = all."""
    dropout: float = 0.0
    """Rate on the probabilities."""

    def setup(self) -> None:
        inner = (self.heads, self.width // self.heads)
        into, back = ("width", "heads", "channels"), ("heads", "channels", "width")
        self.query = Linear((self.width,), inner, into, self.kernel_init)
        self.key = Linear((self.width,), inner, into, self.kernel_init)
        self.value = Linear((self.width,), inner, into, self.kernel_init)
        self.output = Linear(inner, (self.width,), back, self.output_init or self.kernel_init)

    def __call__(
        self,
        x: jax.Array,
        documents: jax.Array,
        key: jax.Array | None = None,
        *,
        collect: bool = False,
    ) -> tuple[jax.Array, jax.Array | None, Past]:
        """x [B, T, D], documents [B, T] -> [B, T, D], the probabilities [B, H, T, T] if they are to be collected, and
        what `extend` needs of it."""
        packed = side_by_side((self.query, self.key, self.value), x)
        y, probabilities = self_attention(
            packed,
            documents,
            causal=self.causal,
            window=self.window,
            rate=self.dropout,
            dropout_key=key,
            collect=collect,
        )
        return self.output(y), probabilities, Past(*(packed[..., n, :].swapaxes(1, 2) for n in (1, 2)))

    def extend(self, x: jax.Array, past: Past, slot: jax.Array | int, mask: jax.Array) -> tuple[jax.Array, Past]:
        """One new position x [B, 1, D] -> [B, 1, D], and the past with its key and value in that slot.

        mask [B, 1, 1, S] says which slots it sees.
        """
        new = Past(self.key(x).swapaxes(1, 2), self.value(x).swapaxes(1, 2))
        past = Past(*(jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis=2) for x, y in zip(past, new, strict=True)))
        query = self.query(x)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("bthc,bhsc->bhts", query, past.keys, preferred_element_type=wide) * query.shape[-1] ** -0.5
        probabilities = masked_softmax(scores, mask).astype(past.values.dtype)
        return self.output(jnp.einsum("bhts,bhsc->bthc", probabilities, past.values)), past
