"""XLNet against a naive two-stream network in float64, and the properties of its order, directions and memory."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Memory
from ctx_jax.layers.masks import Visibility
from ctx_jax.models.xlnet import XLNetConfig

V, T = 30, 8
TINY = XLNetConfig(
    vocabulary_size=V,
    vocabulary_multiple=8,
    width=8,
    layers=2,
    heads=2,
    feed_forward=12,
    memory_length=5,
    reuse_length=4,
    epsilon=1e-5,
)


@partial(jax.jit, static_argnames=("config", "collect"))
def run(config: XLNetConfig, variables: Any, batch: Any, memory: Any = None, key: Any = None, collect: Any = ()) -> Any:
    return config.build().apply(variables, batch, memory, key=key, collect=collect)


def variables_of(config: XLNetConfig = TINY, dtype: Any = jnp.float32) -> Any:
    """Random values everywhere, so that no bias is 0 and no gain 1."""
    model, one = config.build(), {"tokens": jnp.zeros((1, 1), int), "documents": jnp.ones((1, 1), int)}
    template = nn.meta.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), one, method="initialize")))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.1, 0.4, x.shape).astype(dtype), template)


def ranks_of(order: Any, sealed: Any, block: int) -> np.ndarray:
    """The batch's `ranks` from an order drawn in each block; `sealed` are targets, SEP and CLS."""
    order, sealed = np.asarray(order), np.asarray(sealed)
    return np.arange(len(order)) // block * (block + 1) + np.where(sealed, 1 + order, 0)


ORDER = [2, 0, 3, 1, 1, 3, 0, 2]  # of two halves
RANKS = [ranks_of(ORDER, [0, 1, 1, 0, 1, 1, 0, 1], 4), ranks_of(ORDER[::-1], [1, 0, 1, 0, 0, 1, 1, 1], 4)]
BATCH = {
    "tokens": np.arange(2 * T).reshape(2, T),  # each position has a token of its own
    "documents": np.ones((2, T), int),
    "ranks": np.stack(RANKS).astype(np.int32),
    "target_positions": np.array([[1, 2, 4, 5], [0, 2, 5, 6]]),
}
PLAIN = {name: BATCH[name] for name in ("tokens", "documents")}


def random_memory(documents: Any) -> Memory:
    documents = np.asarray(documents)
    shape = (len(documents), TINY.layers, documents.shape[1], TINY.width)
    return Memory(np.random.default_rng(1).normal(size=shape).astype(np.float32), documents)


def naive_norm(x: np.ndarray, p: Any) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + TINY.epsilon) * p["scale"] + p["bias"]


def naive_attention(
    p: Any, x: np.ndarray, source: np.ndarray, places: Any, sees: Any, sign: int, segments: Any, mine: Any
) -> np.ndarray:
    """Queries x [N, D] at `places` of source [S, D]; `sees(n, j)`; segments of the keys and of the queries."""
    width, heads = x.shape[1], p["query"]["kernel"].shape[1]
    y, frequencies = np.zeros_like(x), 10000.0 ** (-np.arange(0, width, 2) / width)
    for head in range(heads):
        w = {name: p[name]["kernel"][:, head] for name in ("query", "key", "value", "position")}
        u, v, b = (p[f"{name}_bias"][head] for name in ("content", "position", "segment"))
        for n, place in enumerate(places):
            scores = {}
            for j in range(len(source)):
                if sees(n, j):
                    angles = sign * (place - j) * frequencies
                    r = np.concatenate([np.sin(angles), np.cos(angles)]) @ w["position"]
                    e = p["segment_embedding"][int(mine[n] != segments[j]), head]
                    q = x[n] @ w["query"]
                    score = (q + u) @ (source[j] @ w["key"]) + (q + v) @ r + (q + b) @ e
                    scores[j] = np.exp(score / math.sqrt(width / heads))
            for j, score in scores.items():
                value = score / sum(scores.values()) * (source[j] @ w["value"])
                y[n] += value @ p["output"]["kernel"][head]
    return y


def naive(p: Any, batch: Any, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
    """Content and query stream, one row, head and pair at a time."""
    contents, queries = [], []
    for row in range(len(batch["tokens"])):
        targets, ranks = batch["target_positions"][row], batch["ranks"][row]
        h = p["tokens"]["embedding"][batch["tokens"][row]]
        g = np.tile(p["query_embedding"], (len(targets), 1))
        old = memory.hidden.shape[2]
        documents = [*memory.documents[row], *batch["documents"][row]]
        segments = [*[0] * old, *batch["segments"][row]]
        sign = -1 if batch["reversed"][row] else 1

        def sees(
            query: int, key: int, own: bool, documents: Any = documents, ranks: Any = ranks, old: int = old
        ) -> bool:
            same = documents[old + query] == documents[key] != 0
            if key < old:
                return same
            return same and (ranks[key - old] < ranks[query] or (own and ranks[key - old] == ranks[query]))

        for index in range(TINY.layers):
            q = jax.tree.map(lambda leaf, i=index: leaf[i], p["stack"]["layers"])
            source = np.concatenate([memory.hidden[row, index], h])
            streams = []
            for x, at, own in ((h, np.arange(T), True), (g, targets, False)):
                y = naive_attention(
                    q["attention"],
                    x,
                    source,
                    old + at,
                    lambda n, j, at=at, own=own, sees=sees: sees(at[n], j, own),
                    sign,
                    segments,
                    batch["segments"][row][at],
                )
                x = naive_norm(x + y, q["attention_norm"])
                f = q["feed_forward"]
                z = x @ f["input"]["kernel"] + f["input"]["bias"]
                z = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
                z = z @ f["output"]["kernel"] + f["output"]["bias"]
                streams.append(naive_norm(x + z, q["feed_forward_norm"]))
            h, g = streams
        contents.append(h)
        queries.append(g)
    return np.stack(contents), np.stack(queries)


def test_both_streams_are_the_naive_network_in_float64():
    """With two documents, an older memory, padding, three segments, and one row that is read backwards."""
    variables = variables_of(dtype=np.float64)
    batch = BATCH | {
        "documents": np.array([[3] * 8, [5, 5, 5, 5, 5, 6, 6, 0]]),
        "segments": np.array([[0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 0, 2, 0]]),
        "reversed": np.array([False, True]),
    }
    memory = random_memory([[0, 2, 3, 3, 3], [4, 5, 5, 5, 5]])
    with jax.enable_x64(True):
        output = jax.device_get(run(TINY, variables, batch, memory))
    content, query = naive(variables["params"], batch, memory)
    assert output.hidden.dtype == output.query.dtype == np.float64
    np.testing.assert_allclose(output.hidden[0], content[0], atol=1e-10)
    np.testing.assert_allclose(output.hidden, content, atol=1e-10)
    np.testing.assert_allclose(output.query, query, atol=1e-10)


def test_the_papers_mask():
    """Tokens t T t T t CLS (T = target) drawn in the order 2 4 0 1 5 3: whom each position does not see."""
    ranks = jnp.asarray(ranks_of([2, 4, 0, 1, 5, 3], [0, 1, 0, 1, 0, 1], 6))[None]
    blocked = [{1, 3, 5}, {1}, {1, 3, 5}, {1, 3, 5}, {1, 3, 5}, {1}]
    ones = jnp.ones_like(ranks)
    content, query = (
        np.asarray(Visibility(ones, ones, ranks, 0 * ranks, highest).mask())[0, 0] for highest in (ranks, ranks - 1)
    )
    for i in range(6):
        assert set(np.flatnonzero(~content[i])) == blocked[i] - {i}
    for i in (1, 3):
        assert set(np.flatnonzero(~query[i])) == blocked[i]


def jacobian(config: XLNetConfig, batch: Any, pick: Any) -> np.ndarray:
    """[..., rows of the table]: whether what `pick` takes from the output depends on a token's embedding."""
    variables = variables_of(config)

    def outputs(table: jax.Array) -> jax.Array:
        params = variables["params"] | {"tokens": {"embedding": table}}
        output = config.build().apply({"params": params}, batch)
        return pick(output) @ jnp.arange(1.0, 9.0)

    table = variables["params"]["tokens"]["embedding"]
    return np.abs(jax.jit(jax.jacrev(outputs))(table)).sum(-1) != 0


def test_a_target_depends_on_what_is_before_it_in_the_order_and_on_nothing_else():
    """By gradients, exactly: not on itself nor on later ones in the order; on every earlier one, and on context."""
    depends = jacobian(TINY, BATCH, lambda output: output.query)
    for row, k in np.ndindex(2, 4):
        ranks = BATCH["ranks"][row]
        before = ranks < ranks[BATCH["target_positions"][row, k]]
        np.testing.assert_array_equal(depends[row, k, row * T : (row + 1) * T], before)
        assert depends[row, k].sum() == before.sum()


def test_the_memory_does_not_know_the_second_half():
    """The next window begins with it and predicts it."""
    variables, tokens = variables_of(), BATCH["tokens"].copy()
    tokens[:, 4:] = 29 - tokens[:, 4:]
    one, other = (jax.device_get(run(TINY, variables, BATCH | {"tokens": t})) for t in (BATCH["tokens"], tokens))
    np.testing.assert_array_equal(one.memory.hidden, other.memory.hidden)
    np.testing.assert_array_equal(one.query[BATCH["target_positions"] < 4], other.query[BATCH["target_positions"] < 4])
    assert (one.query[BATCH["target_positions"] > 5] != other.query[BATCH["target_positions"] > 5]).any()


def test_without_an_order_everybody_sees_everybody_or_what_is_earlier():
    documents = np.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    batch = {"tokens": np.arange(T)[None], "documents": documents}
    same = (documents[0][:, None] == documents[0]) & (documents[0] > 0)
    for causal in (False, True):
        config = replace(TINY, causal=causal, layers=1)
        depends = jacobian(config, batch, lambda output: output.hidden[0])
        expected = (same & np.tri(T, dtype=bool) if causal else same) | np.eye(T, dtype=bool)
        np.testing.assert_array_equal(depends[:, :T], expected)
    assert jax.eval_shape(partial(run, TINY), variables_of(), batch).query is None
    with pytest.raises(ValueError, match="a causal XLNet cannot read a permuted batch: choose causal False"):
        replace(TINY, causal=True).build().apply(variables_of(), BATCH)


def test_a_reversed_row_is_the_text_read_the_other_way_round():
    """Text that is turned round, its distances negated, is the same text: all is as in the unreversed row, mirrored."""
    variables = variables_of(dtype=np.float64)
    segments = np.array([[0, 0, 1, 1, 1, 0, 2, 0]] * 2)
    turned = {name: x[:, ::-1] for name, x in (BATCH | {"segments": segments}).items()}
    turned |= {"target_positions": T - 1 - BATCH["target_positions"], "reversed": np.ones(2, bool)}
    with jax.enable_x64(True):
        forward = jax.device_get(run(TINY, variables, BATCH | {"segments": segments}))
        backward = jax.device_get(run(TINY, variables, turned))
        straight = jax.device_get(run(TINY, variables, turned | {"reversed": np.zeros(2, bool)}))
    np.testing.assert_allclose(backward.hidden, forward.hidden[:, ::-1], atol=1e-12)
    np.testing.assert_allclose(backward.query, forward.query, atol=1e-12)
    assert not np.allclose(straight.query, forward.query, atol=1e-3)


def test_the_memory_takes_the_first_half_of_the_window():
    memory = random_memory([[0, 0, 1, 1, 1], [9, 9, 9, 1, 1]])
    output = jax.device_get(run(TINY, variables_of(), BATCH, memory, collect=("layers", "attention")))
    np.testing.assert_array_equal(output.memory.hidden[:, :, 0], memory.hidden[:, :, -1])
    np.testing.assert_array_equal(output.memory.hidden[:, :, 1:], output.layers[:, :-1, :4])
    assert output.memory.documents.tolist() == [[1] * 5] * 2
    assert output.attention.shape == (2, 2, 2, T, 5 + T)
    np.testing.assert_allclose(output.attention.sum(-1), 1.0, rtol=1e-5)
    assert (output.attention[1, ..., :3] == 0).all()
    assert TINY.build().init_memory(2).hidden.shape == output.memory.hidden.shape == (2, 2, 5, 8)
    assert replace(TINY, memory_length=0).build().init_memory(2) is None


def test_no_memory_is_an_empty_one():
    variables = variables_of()
    without, empty = (jax.device_get(run(TINY, variables, BATCH, m)) for m in (None, TINY.build().init_memory(2)))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), without, empty)


def test_scan_remat_and_loop_are_the_same():
    variables, memory = variables_of(), random_memory([[0, 1, 1, 1, 1]] * 2)

    @partial(jax.jit, static_argnums=0)
    def gradients(config: XLNetConfig) -> Any:
        def total(variables: Any) -> Any:
            output = config.build().apply(variables, BATCH, memory)
            return jnp.sin(output.hidden).sum() + jnp.sin(output.query).sum(), output

        return jax.value_and_grad(total, has_aux=True)(variables)

    expected, actual = (jax.device_get(gradients(c)) for c in (TINY, replace(TINY, scan=False, remat=True)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def test_the_last_position_is_pooled():
    config = replace(TINY, memory_length=0, pooler=True, classes=3)
    variables, model = variables_of(config), config.build()
    output = run(config, variables, PLAIN)
    p = variables["params"]["pooler"]
    expected = np.tanh(output.hidden[:, -1] @ p["kernel"] + p["bias"])
    np.testing.assert_allclose(output.pooled, expected, rtol=1e-5)
    classes = model.apply(variables, output.pooled.astype(jnp.bfloat16), method="classify")
    assert classes.shape == (2, 3) and classes.dtype == jnp.float32
    assert output.memory is None


def test_a_head_at_every_token_reads_the_content_stream():
    config = replace(TINY, memory_length=0, token_classes=3)
    variables, model = variables_of(config), config.build()
    hidden = run(config, variables, PLAIN).hidden
    p = variables["params"]["token_classifier"]
    given = model.apply(variables, hidden, method="classify_tokens")
    np.testing.assert_allclose(given, hidden @ p["kernel"] + p["bias"], rtol=1e-5, atol=1e-6)
    assert given.shape == (*hidden.shape[:2], 3) and given.dtype == jnp.float32


def test_left_padding_changes_nothing():
    variables = variables_of()
    padded = {
        "tokens": np.pad(PLAIN["tokens"], ((0, 0), (3, 0))),
        "documents": np.pad(PLAIN["documents"], ((0, 0), (3, 0))),
    }
    alone, with_padding = (run(TINY, variables, batch).hidden for batch in (PLAIN, padded))
    np.testing.assert_allclose(with_padding[:, 3:], alone, atol=1e-5)


def test_dropout_follows_its_key_in_both_streams():
    config = replace(TINY, dropout=0.5, layers=1, width=32)
    variables = variables_of(config)
    first, again, other = (run(config, variables, BATCH, key=jax.random.key(k, impl="rbg")) for k in (0, 0, 1))
    for name in ("hidden", "query"):
        x = getattr(first, name)
        np.testing.assert_array_equal(x, getattr(again, name))
        assert ((x == 0) != (getattr(other, name) == 0)).any()
        assert abs((x == 0).mean() - 0.5) < 4 * math.sqrt(0.25 / x.size)


def test_bfloat16_keeps_its_memory_narrow_and_its_scores_wide():
    config = replace(TINY, dtype="bfloat16")
    variables = variables_of()
    narrow = run(config, variables, BATCH, config.build().init_memory(2))
    exact = run(TINY, variables, BATCH, TINY.build().init_memory(2))
    assert narrow.hidden.dtype == narrow.query.dtype == narrow.memory.hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.query.astype(jnp.float32), exact.query, atol=0.1)
    assert config.build().apply(variables, narrow.query, method="logits").dtype == jnp.float32


def test_score_is_that_of_the_logits():
    model, variables = TINY.build(), variables_of()
    hidden = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    targets, weights = np.array([[1, 7, 29], [3, 20, 7]]), np.array([[1, 0.5, 0], [2, 1, 1]], np.float32)
    logits = jax.jit(partial(model.apply, method="logits"))(variables, hidden)
    p = variables["params"]
    expected = hidden @ p["tokens"]["embedding"].T + p["head_bias"]
    np.testing.assert_allclose(logits, expected[..., :V], rtol=1e-4, atol=1e-5)
    scores = jax.jit(partial(model.apply, method="score"))(variables, hidden, targets, weights)
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores.total, (weights * nll).sum(), rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_decoding_is_the_full_two_stream_pass(causal: bool):
    """Token for token: the prompt is context, what follows comes in the order of the text, and each token is predicted
    by the query stream; for prompts of different lengths (one of a single token), padded on either side."""
    config = replace(TINY, causal=causal)
    variables, model = variables_of(config), config.build()
    texts = np.random.default_rng(1).integers(0, V, (3, T))
    lengths, room, steps = (1, 4, 3), 3, 5  # the last token of a prompt is decoded
    tokens, documents = np.zeros((3, room), int), np.zeros((3, room), int)
    for row, length in enumerate(lengths):
        columns = slice(0, length - 1) if row == 1 else slice(room - length + 1, room)
        tokens[row, columns], documents[row, columns] = texts[row, : length - 1], row + 1
    context = np.array(lengths)[:, None] - 1
    full = {
        "tokens": np.pad(texts, ((0, 0), (0, 1))),
        "documents": np.ones((3, T + 1), int),
        "ranks": np.arange(T + 1) if causal else np.maximum(np.arange(T + 1) - context + 1, 0),
        "target_positions": context + 1 + np.arange(steps),
    }
    full["ranks"] = np.broadcast_to(full["ranks"], (3, T + 1)).astype(np.int32)
    expected = jax.jit(partial(model.apply, method="logits"))(variables, run(TINY, variables, full).query)

    cache = jax.jit(lambda b: model.apply(variables, b, room + steps, method="start"))(
        {"tokens": tokens, "documents": documents}
    )
    decode = jax.jit(lambda t, c: model.apply(variables, t, c, method="decode"))
    for step in range(steps):
        logits, cache = decode(texts[np.arange(3), context[:, 0] + step][:, None], cache)
        np.testing.assert_allclose(logits, expected[:, step], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads 3 does not divide width 8: choose a divisor of 8"),
        ({"memory_length": -1}, "memory_length -1 is not a length: choose 0 (no memory) or more"),
        ({"reuse_length": 0}, "reuse_length 0 is not a length: choose 1 or more, or None"),
        ({"activation": "silu"}, "activation 'silu' is not known: choose one of gelu, gelu_tanh, relu"),
        ({"classes": 2}, "classes 2 need the pooled vector: choose pooler True or classes None"),
    ],
)
def test_impossible_configs(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)
    assert str(error.value) == message
