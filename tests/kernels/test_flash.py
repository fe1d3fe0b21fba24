"""The kernels, interpreted, against their twins of plain JAX: values and all gradients, dropout on."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.kernels import blocks, flash, tiles
from ctx_jax.layers import attention, relative
from ctx_jax.layers.masks import Segments, Visibility

B, H, C = 2, 2, 20
KEY = jax.random.key(7)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 16)
    monkeypatch.setattr(tiles, "READ", 2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def documents(seed: int, length: int, count: int = 3) -> jax.Array:
    """Several in a row, and padding in front."""
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, count, (B, length)), axis=1), jnp.int32)


def agree(ours, twin, *operands):
    """Both functions and their gradients by all operands, of a random sum of what they return."""
    weights = normal(99, *jax.eval_shape(twin, *operands).shape)

    def both(function):
        return jax.jit(jax.value_and_grad(lambda *x: (function(*x) * weights).sum(), tuple(range(len(operands)))))

    (value, gradients), (expected, wanted) = both(ours)(*operands), both(twin)(*operands)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-4)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert np.abs(want).max() > 1e-3  # there is something to compare
        np.testing.assert_allclose(gradient, want, atol=2e-6 * np.abs(want).max() * np.sqrt(want.size))


@pytest.mark.parametrize(
    ("causal", "window", "length", "rate"),
    [(False, None, 37, 0.2), (True, None, 48, 0.0), (True, 11, 50, 0.1)],
)
def test_attention(causal, window, length, rate):
    own = documents(0, length)
    ranks = jnp.arange(length)[None] if causal else jnp.zeros((1, length), jnp.int32)
    lowest = ranks - (window or length) + 1 if causal else ranks
    visibility = Visibility(own, own, ranks, lowest, ranks)

    def ours(*qkv):
        return flash.attention(*qkv, visibility, rate, KEY, interpret=True)

    def twin(*qkv):
        return attention.attention(*qkv, own, own, causal=causal, window=window, rate=rate, dropout_key=KEY)[0]

    agree(ours, twin, *(normal(seed, B, length, H, C) for seed in range(3)))


@pytest.mark.parametrize(("causal", "length", "channels", "rate"), [(True, 50, 24, 0.1), (False, 37, 16, 0.0)])
def test_what_is_packed_is_read_where_it_is(causal, length, channels, rate):
    """As if queries, keys and values had been taken apart, to the last bit, their gradients too."""
    own = documents(2, length)
    visibility = attention.visible(own, causal, None)
    packed = normal(0, B, length, H, 3, channels)

    def apart(x):
        return flash.attention(*(x[..., n, :] for n in range(3)), visibility, rate, KEY, interpret=True)

    def together(x):
        return flash.self_attention(x, visibility, rate, KEY, interpret=True)

    for run in (lambda f: f(packed), lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(packed)):
        np.testing.assert_array_equal(run(together), run(apart))


def test_packed_keys_and_values_are_read_where_they_are():
    queries, keys = 37, 60
    own = documents(2, keys)
    at = jnp.broadcast_to(jnp.arange(keys - queries, keys), (B, queries))
    visibility = Visibility(jnp.take_along_axis(own, at, axis=1), own, jnp.arange(keys)[None], at * 0, at)
    operands = normal(0, B, queries, H, C), normal(1, B, keys, H, 2, C), normal(2, keys, H, C), normal(3, H, C)

    def apart(query, packed, r, u):
        position = flash.Position(r, u, -u, None, None)
        pair = packed[..., 0, :], packed[..., 1, :]
        return flash.relative_attention(query, *pair, position, visibility, None, 0.2, KEY, interpret=True)

    def together(query, packed, r, u):
        position = flash.Position(r, u, -u, None, None)
        return flash.relative_attention(query, packed, None, position, visibility, None, 0.2, KEY, interpret=True)

    for run in (lambda f: f(*operands), lambda f: jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2, 3))(*operands)):
        jax.tree.map(np.testing.assert_array_equal, run(together), run(apart))


@pytest.mark.parametrize(
    ("case", "queries", "keys"),
    [
        ("causal, memory", 61, 90),  # four blocks: programs take every second query; of three or six, all in a row
        ("band", 96, 96),
        ("two directions, segments", 37, 60),
        ("two directions, segments", 128, 130),  # every fourth is written together, every second read
        ("places", 37, 60),
        ("places, segments", 37, 60),
        ("both, segments", 61, 70),
    ],
)
def test_relative_attention(case, queries, keys):
    rng = np.random.default_rng(1)
    causal = case in ("causal, memory", "band")
    places = direction = None
    at = jnp.broadcast_to(jnp.arange(keys - queries, keys), (B, queries))
    if case.startswith(("places", "both")):
        places = jnp.asarray(np.stack([rng.permutation(keys)[:queries] for _ in range(B)]), jnp.int32)
        at, queries = (places, queries) if "places" in case else (jnp.concatenate([at, places], 1), 2 * queries)
    key_documents = documents(2, keys)
    own = jnp.take_along_axis(key_documents, at, axis=1)
    if causal:
        lowest = at - 20 if case == "band" else jnp.zeros((1, queries), jnp.int32)
        visibility = Visibility(own, key_documents, jnp.arange(keys)[None], lowest, at)
    else:
        order = jnp.asarray(np.stack([rng.permutation(keys) for _ in range(B)]), jnp.int32)
        order = jnp.where(jnp.arange(keys) < 9, -(2**31), order)  # a memory that all see
        highest = jnp.take_along_axis(order, at, axis=1) - 1
        visibility = Visibility(own, key_documents, order, jnp.full((1, 1), -(2**31)), highest)
    distances = keys if causal else 2 * keys if places is not None else keys + queries
    shape = (distances, H, C)
    if "segments" in case:
        shape, direction = (2, *shape), jnp.array([1, 0])
    segments = [jnp.asarray(rng.integers(0, 2, (B, n)), jnp.int32) for n in (queries, keys)]

    def arguments(*x):
        given = Segments(*segments, x[6], x[7]) if "segments" in case else None
        return x[:3], x[3:6], given

    def ours(*x):
        qkv, (r, u, v), given = arguments(*x)
        position = flash.Position(r, u, v, direction, places)
        return flash.relative_attention(*qkv, position, visibility, given, 0.2, KEY, interpret=True)

    def twin(*x):
        qkv, ruv, given = arguments(*x)
        options = {"direction": direction, "places": places, "segments": given, "rate": 0.2, "dropout_key": KEY}
        return relative.relative_attention(*qkv, *ruv, visibility, **options)[0]

    operands = [normal(3, B, queries, H, C), normal(4, B, keys, H, C), normal(5, B, keys, H, C), normal(6, *shape)]
    operands += [normal(7, H, C), normal(8, H, C)]
    if "segments" in case:
        operands += [normal(9, 2, H, C), normal(10, H, C)]
    agree(ours, twin, *operands)


@pytest.mark.parametrize("clamp", [1, 21, 22, 70])  # at 22, the last key of a block is one place too near
def test_only_one_of_the_distances_beyond_the_clamp_is_read(clamp):
    queries, keys = 64, 100  # four blocks, so that programs take every second query
    own = documents(2, keys)
    at = jnp.broadcast_to(jnp.arange(keys - queries, keys), (B, queries))
    visibility = Visibility(jnp.take_along_axis(own, at, 1), own, jnp.arange(keys)[None], at - 64, at)
    relative_keys = normal(3, keys, H, C)[jnp.minimum(relative.distances(keys, keys, causal=True), clamp)]
    operands = [normal(0, B, queries, H, C), normal(1, B, keys, H, C), normal(2, B, keys, H, C), relative_keys]
    operands += [normal(4, H, C), normal(5, H, C)]

    def ours(*x):
        position = flash.Position(*x[3:], None, None)
        return flash.relative_attention(*x[:3], position, visibility, None, 0.0, None, clamp, interpret=True)

    def twin(*x):
        return relative.relative_attention(*x, visibility)[0]

    # those of the nearest blocks are all written: the first query's first near key may be 15 places farther
    unread = slice(1, max(1, keys - 1 - clamp - 30))
    spoilt = [*operands[:3], relative_keys.at[unread].set(jnp.nan), *operands[4:]]
    np.testing.assert_allclose(jax.jit(ours)(*spoilt), jax.jit(twin)(*operands), atol=2e-6)
    agree(ours, twin, *operands)  # the backward pass reads them all


def test_position_terms_computed_again_are_those_that_were_kept(monkeypatch):
    own, ranks = jnp.ones((1, 20), jnp.int32), jnp.arange(20)[None]
    visibility = Visibility(own, own, ranks, ranks * 0, ranks)
    operands = [normal(seed, 1, 20, 1, 16) for seed in range(3)]
    operands += [normal(3, 20, 1, 16), normal(4, 1, 16), normal(5, 1, 16)]

    def loss(*x):
        position = flash.Position(*x[3:], None, None)
        y = flash.relative_attention(*x[:3], position, visibility, None, 0.2, KEY, interpret=True)
        return (y * normal(6, *y.shape)).sum()

    def gradients(written):
        traced = jax.jit(jax.grad(loss, tuple(range(6)))).trace(*operands)
        assert str(traced.jaxpr).count("name=scores_kernel") == written
        return traced.lower().compile()(*operands)

    kept = gradients(1)
    monkeypatch.setattr(flash, "KEPT", 0)
    jax.clear_caches()
    for again, expected in zip(gradients(2), kept, strict=True):
        # interpreted, a kernel is compiled with what surrounds it, which changes how it rounds
        np.testing.assert_allclose(again, expected, atol=2e-6 * np.abs(expected).max())


def test_blocks_that_nobody_sees_are_skipped_and_no_other():
    length = 64  # four blocks
    own = jnp.asarray([[1] * 32 + [2] * 32, [0] * 20 + [3] * 44], jnp.int32)
    ranks = jnp.arange(length)[None]
    code, lowest, highest = blocks.codes(Visibility(own, own, ranks, ranks * 0, ranks))
    facts = tiles.Facts(
        jnp.stack([jnp.broadcast_to(x, (B, length)) for x in (lowest, highest - lowest, ranks)], 1),
        jnp.stack([code, jnp.broadcast_to(ranks, (B, length))], 1),
        None,
        None,
    )
    of_queries, of_keys = blocks.bounds(facts, [tiles.Part(0, length)])
    assert of_queries[0, :, :2].tolist() == [[0, 1], [0, 2], [2, 3], [2, 4]]
    assert of_keys[0, :, :2].tolist() == [[0, 2], [1, 2], [2, 4], [3, 4]]
    assert of_queries[1, :, :2].tolist() == [[0, 0], [1, 2], [1, 3], [1, 4]]
    assert of_keys[1, :, :2].tolist() == [[0, 0], [1, 4], [2, 4], [3, 4]]
    # row 0: blocks 1 and 3 see the block before whole; row 1: the first key of block 1's is padding
    whole = [(*row, j) for row in np.ndindex(2, 4) for j in range(*of_queries[*row, 2:])]
    assert whole == [(0, 1, 0), (0, 3, 2), (1, 3, 2)]
    assert sorted((b, i, j) for b, j in np.ndindex(2, 4) for i in range(*of_keys[b, j, 2:])) == whole
    halves = blocks.bounds(facts, [tiles.Part(0, 32), tiles.Part(32, 32, 2)])[1]
    assert halves[1, :, [0, 1, 4, 5]].T.tolist() == [[0, 0, 2, 2], [1, 2, 2, 4], [0, 0, 2, 4], [0, 0, 3, 4]]


def test_codes_say_what_the_mask_says():
    rng = np.random.default_rng(5)
    own, other = (jnp.asarray(rng.integers(0, 4, (B, n)), jnp.int32) for n in (9, 15))
    ranks = jnp.asarray(rng.integers(-3, 12, (B, 15)), jnp.int32).clip(-1)
    lowest, highest = (jnp.asarray(rng.integers(-1, 12, (B, 9)), jnp.int32) for _ in range(2))
    visibility = Visibility(own, other, ranks, lowest, highest)
    code, low, high = blocks.codes(visibility)
    seen = (code[:, None] >= low[..., None]) & (code[:, None] <= high[..., None])
    np.testing.assert_array_equal(seen, visibility.mask()[:, 0])
    assert seen.any()
    assert not seen.all()


def test_obstacles():
    bf16 = partial(jnp.zeros, dtype=jnp.bfloat16)
    assert flash.obstacle(bf16((1, 8, 2, 64)), bf16((1, 8, 2, 64))) == "fewer than 16 queries"
    assert "32769 keys" in flash.obstacle(bf16((1, 16, 1, 8)), bf16((1, 2**15 + 1, 1, 8)))
    assert "256 channels" in flash.obstacle(bf16((1, 16, 1, 256)), bf16((1, 16, 1, 256)))
    assert flash.obstacle(bf16((1, 16, 1, 8)), bf16((1, 16, 1, 8))) == "no kernel for cpu"


def test_position_terms_beyond_float16_stay_finite():
    """Scores of 2e5 before they are scaled, as a diverging run has them: like the twin's, in bf16."""
    operands = [100 * normal(n, 1, 16, 1, 64) for n in range(3)]
    relative_keys, bias = 100 * normal(3, 16, 1, 64), jnp.zeros((1, 64))
    operands = [x.astype(jnp.bfloat16) for x in (*operands, relative_keys)]
    own, ranks = jnp.ones((1, 16), jnp.int32), jnp.arange(16)[None]
    visibility = Visibility(own, own, ranks, ranks * 0, ranks)

    def ours(query, key, value, distances):
        position = flash.Position(distances, bias, bias, None, None)
        return flash.relative_attention(query, key, value, position, visibility, None, 0.0, None, interpret=True)

    def twin(*x):
        return relative.relative_attention(*x, bias, bias, visibility)[0]

    products = jnp.einsum("bthc,phc->bhtp", operands[0], operands[3], preferred_element_type=jnp.float32)
    assert jnp.abs(products).max() > 65_504
    for run in (ours, lambda *x: jax.grad(lambda *x: ours(*x).astype(jnp.float32).sum(), (0, 1, 2, 3))(*x)):
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(jax.jit(run)(*operands)))
    np.testing.assert_array_equal(jax.jit(ours)(*operands), jax.jit(twin)(*operands))
