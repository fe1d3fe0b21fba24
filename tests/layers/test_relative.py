"""Relative attention against naive loops over pairs, and what surrounds it: distances, visibility, memory, slots."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.layers.relative import (
    distances,
    encode,
    position_scores,
    relative_attention,
    remember,
    slots,
)

attend = partial(jax.jit, static_argnames="rate")(relative_attention)
B, T, M, H, C = 2, 4, 3, 2, 5
S = M + T


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    r: dict[int, np.ndarray],
    u: np.ndarray,
    w: np.ndarray,
    sees: np.ndarray,
    places: np.ndarray,
    segment: np.ndarray | None = None,
) -> np.ndarray:
    """One pair at a time: r by distance [H, C], sees [B, T, S], places [B, T], segment [B, T, S, H] already scored."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        scores = {}
        for j in np.flatnonzero(sees[b, i]):
            score = (q[b, i, h] + u[h]) @ k[b, j, h] + (q[b, i, h] + w[h]) @ r[int(places[b, i] - j)][h]
            scores[j] = (score + (0.0 if segment is None else segment[b, i, j, h])) / np.sqrt(C)
        total = sum(np.exp(s) for s in scores.values())
        for j, score in scores.items():
            out[b, i, h] += np.exp(score) / total * v[b, j, h]
    return out


def everything(documents: np.ndarray, key_documents: np.ndarray) -> Visibility:
    zero = jnp.zeros((1, 1), jnp.int32)
    ranks = jnp.zeros((1, key_documents.shape[1]), jnp.int32)
    return Visibility(jnp.asarray(documents), jnp.asarray(key_documents), ranks, zero, zero)


def test_distances_descend_from_the_first_key_and_are_clamped():
    assert distances(3, 5).tolist() == [4, 3, 2, 1, 0, -1, -2]
    assert distances(3, 5, causal=True).tolist() == [4, 3, 2, 1, 0]
    assert distances(4, 4, clamp=2).tolist() == [2, 2, 1, 0, -1, -2, -2]


def test_encoding_is_sines_then_cosines():
    np.testing.assert_allclose(
        encode(jnp.array([-3, 0]), 4, jnp.float32),
        [[np.sin(-3), np.sin(-0.03), np.cos(3), np.cos(0.03)], [0, 0, 1, 1]],
        rtol=1e-6,
    )
    assert encode(jnp.array([1]), 4, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
def test_shift_is_the_loop_over_pairs(causal: bool, by_row: bool):
    q = normal(0, B, T, H, C)
    n = distances(T, S, causal=causal).tolist()
    r = normal(1, B, len(n), H, C)
    r = r if by_row else np.broadcast_to(r[:1], r.shape)
    with jax.enable_x64(True):
        scores = jax.jit(position_scores, static_argnums=2)(q, r if by_row else r[0], S)
    assert scores.shape == (B, H, T, S) and scores.dtype == np.float64
    for b, h, i, j in np.ndindex(B, H, T, S):
        if M + i - j in n:
            expected = q[b, i, h] @ r[b, n.index(M + i - j), h]
            np.testing.assert_allclose(scores[b, h, i, j], expected, rtol=1e-12)


def test_a_single_query_needs_no_shift():
    q, r = normal(0, 1, 1, H, C), normal(1, S, H, C)
    scores = jax.jit(position_scores, static_argnums=2)(q, r, S)
    np.testing.assert_allclose(scores[0, :, 0], np.einsum("hc,phc->hp", q[0, 0], r), rtol=1e-5)


def test_queries_at_any_place_are_the_loop_over_pairs():
    q, places = normal(0, B, 3, H, C), np.array([[3, 6, 3], [5, 4, 6]])
    n = distances(T, S).tolist()
    r = normal(1, len(n), H, C)
    with jax.enable_x64(True):
        scores = jax.jit(position_scores, static_argnums=2)(q, r, S, places)
    for b, h, i, j in np.ndindex(B, H, 3, S):
        expected = q[b, i, h] @ r[n.index(places[b, i] - j), h]
        np.testing.assert_allclose(scores[b, h, i, j], expected, rtol=1e-12)


@pytest.mark.parametrize("at_places", [True, False])
def test_attention_is_the_loop_over_pairs(at_places: bool):
    q, k, v = normal(0, B, T, H, C), normal(1, B, S, H, C), normal(2, B, S, H, C)
    n = distances(T, S).tolist()
    r, u, w = normal(3, len(n), H, C), normal(4, H, C), normal(5, H, C)
    embedding, bias = normal(6, 2, H, C), normal(7, H, C)
    places = np.array([[3, 6, 3, 4], [5, 4, 6, 5]]) if at_places else np.tile(M + np.arange(T), (B, 1))
    documents, key_documents = np.array([[1, 1, 2, 0], [1, 1, 1, 1]]), np.array([[0, 1, 1, 1, 1, 2, 0], [1] * S])
    ranks = np.random.default_rng(8).integers(0, 5, (B, S))
    lowest, highest = np.full((B, T), 1), np.random.default_rng(9).integers(1, 5, (B, T))
    segments = np.array([[0, 1, 1, 0], [2, 0, 1, 2]]), np.random.default_rng(10).integers(0, 3, (B, S))

    different = (segments[0][:, :, None] != segments[1][:, None, :]).astype(int)
    segment = np.einsum("bthc,btshc->btsh", q + bias, embedding[different])
    sees = (documents[:, :, None] == key_documents[:, None, :]) & (key_documents > 0)[:, None, :]
    sees &= (ranks >= 1)[:, None, :] & (ranks[:, None, :] <= highest[:, :, None])
    expected = naive_attention(q, k, v, dict(zip(n, r, strict=True)), u, w, sees, places, segment)
    with jax.enable_x64(True):
        actual, probabilities = jax.device_get(
            attend(
                *(q, k, v, r, u, w),
                Visibility(*map(jnp.asarray, (documents, key_documents, ranks, lowest, highest))),
                places=places if at_places else None,
                segments=Segments(*map(jnp.asarray, (*segments, embedding, bias))),
            )
        )
    assert not sees[0, 3].any()
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(probabilities > 0, np.broadcast_to(sees[:, None], (B, H, T, S)))
    np.testing.assert_allclose(probabilities.sum(-1), np.broadcast_to(sees.any(-1)[:, None], (B, H, T)), rtol=1e-12)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    documents = np.array([[0, 1]])

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, r, u, w = (normal(1, *shape) for shape in ((1, 2, H, C), (1, 2, H, C), (3, H, C), (H, C), (H, C)))
        y, _ = relative_attention(q, *map(jnp.asarray, (k, v, r, u, w)), everything(documents, documents))
        return y.sum(), y

    (_, y), gradient = jax.device_get(run(normal(0, 1, 2, H, C)))
    assert (y[0, 0] == 0).all() and (y[0, 1] != 0).all()
    assert (gradient[0, 0] == 0).all() and np.isfinite(gradient).all()


def test_dropout_falls_on_the_probabilities():
    q, k, identity = normal(0, 1, 6, 1, 6), normal(1, 1, 6, 1, 6), np.eye(6)[None, :, None]
    documents, bias = np.ones((1, 6), int), np.zeros((1, 6))
    visibility = everything(documents, documents)
    key = jax.random.key(0)
    dropped, probabilities = jax.device_get(
        attend(q, k, identity, np.zeros((11, 1, 6)), bias, bias, visibility, rate=0.25, dropout_key=key)
    )
    ratio = dropped[0, :, 0] / probabilities[0, 0]
    assert set(np.round(ratio.ravel(), 4)) == {0.0, np.float32(1.3333)}


def test_bfloat16_is_summed_and_normalised_in_float32():
    shapes = ((B, T, H, C), (B, S, H, C), (B, S, H, C), (S + T - 1, H, C), (H, C), (H, C))
    narrow = [normal(seed, *shape).astype(jnp.bfloat16) for seed, shape in enumerate(shapes)]
    visibility = everything(np.ones((B, T), int), np.ones((B, S), int))
    exact, _ = attend(*(x.astype(np.float32) for x in narrow), visibility)
    narrow, probabilities = attend(*narrow, visibility)
    assert narrow.dtype == jnp.bfloat16 and probabilities.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(narrow, np.float32), exact, atol=0.05)


def test_memory_keeps_the_last_of_what_was_reused():
    memory, window = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[4.0, 5.0, 6.0, 7.0]])
    assert remember(memory, window, 3).tolist() == [[5, 6, 7]]
    assert remember(memory, window, 3, reuse=2).tolist() == [[3, 4, 5]]
    assert remember(memory, window, 6, reuse=1).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert remember(memory[:, :0], window, 2).tolist() == [[6, 7]]
    assert remember(memory, window, 0).shape == (1, 0)
    assert (jax.grad(lambda x: remember(x, window, 5).sum())(memory) == 0).all()


def test_prompts_end_in_the_same_slot():
    batch = {
        "tokens": np.array([[7, 8, 0, 0], [0, 0, 0, 9], [1, 2, 3, 4], [0, 0, 0, 0]]),
        "documents": np.array([[1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
    }
    tokens, documents = slots(batch, 6)
    assert tokens.tolist() == [[0, 0, 7, 8, 0, 0], [0, 0, 0, 9, 0, 0], [1, 2, 3, 4, 0, 0], [0] * 6]
    assert documents.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6]
    with pytest.raises(ValueError, match="length 3 is shorter than the prompts: choose 4 or more"):
        slots(batch, 3)
