"""The adaptive softmax against a naive one of all V log-probabilities, and its embedding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Penalties
from ctx_jax.layers import adaptive
from ctx_jax.layers.adaptive import AdaptiveVocabulary

V, D, CUTOFFS = 23, 8, (5, 11)
B, K = 3, 20
NORMAL = nn.initializers.normal(1.0)
OPTIONS: dict[str, Any] = {
    "vocabulary_size": V,
    "vocabulary_multiple": 4,
    "width": D,
    "embedding_width": D,
    "cutoffs": CUTOFFS,
    "divisor": 1,
    "tie_projections": True,
    "project_equal": True,
    "embedding_init": NORMAL,
    "projection_init": NORMAL,
}
VARIANTS = {
    "plain": {"cutoffs": ()},
    "projected plain": {"cutoffs": (), "embedding_width": 4},
    "wt103 base": {},
    "wt103 large": {"divisor": 2},
    "lm1b": {"divisor": 2, "tie_projections": False, "project_equal": False},
    "one projection": {"embedding_width": 4},
}


def built(name: str) -> tuple[AdaptiveVocabulary, Any]:
    """The module and random parameters, biases included."""
    module = AdaptiveVocabulary(**(OPTIONS | VARIANTS[name]))

    def touch(module: AdaptiveVocabulary) -> None:
        module(jnp.zeros((1, 1), jnp.int32))
        module.logits(jnp.zeros((1, 1, D)))

    template = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), method=touch)))
    rng = np.random.default_rng(0)
    return module, jax.tree.map(lambda x: rng.normal(size=x.shape), template)


def projection(p: Any, kind: str, band: int) -> np.ndarray:
    """[W, D] of a band's input or output, by the rules of the original code."""
    shared = p.get("input_projections_1") is None and p.get("input_projections_0") is not None
    own = p.get(f"input_projections_{0 if shared else band}")
    if kind == "output":
        own = p.get(f"output_projections_{band}", own)
    return np.eye(D) if own is None else own["kernel"]


def bounds(name: str) -> list[tuple[int, int]]:
    edges = (0, *(OPTIONS | VARIANTS[name])["cutoffs"], V)
    return list(pairwise(edges))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def naive_logits(name: str, p: Any, hidden: np.ndarray) -> np.ndarray:
    """Log-probabilities [..., V] (logits, without cutoffs), band by band."""
    out, head = [], None
    for band, (low, high) in enumerate(bounds(name)):
        x = hidden @ projection(p, "output", band).T
        table, bias = (p[f"tables_{band}"][leaf][: high - low] for leaf in ("embedding", "bias"))
        if head is None:
            tails = p.get("tails", {"embedding": np.zeros((0, table.shape[1])), "bias": np.zeros(0)})
            head = x @ np.concatenate([table, tails["embedding"]]).T + np.concatenate([bias, tails["bias"]])
            head = log_softmax(head) if "tails" in p else head
            out.append(head[..., :high])
        else:
            size = bounds(name)[0][1]
            out.append(head[..., size + band - 1, None] + log_softmax(x @ table.T + bias))
    return np.concatenate(out, axis=-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_embedding_are_the_naive_ones(name: str):
    module, variables = built(name)
    p = variables["params"]
    hidden, ids = np.random.default_rng(1).normal(size=(2, D)), np.arange(V)

    def both(variables: Any) -> Any:
        return module.apply(variables, hidden, method="logits"), module.apply(variables, ids)

    with jax.enable_x64(True):
        logits, vectors = jax.jit(both)(variables)
    np.testing.assert_allclose(logits, naive_logits(name, p, hidden), rtol=1e-10)
    if "tails" in p:
        np.testing.assert_allclose(np.exp(logits).sum(-1), 1.0, rtol=1e-12)
    for band, (low, high) in enumerate(bounds(name)):
        expected = p[f"tables_{band}"]["embedding"][: high - low] @ projection(p, "input", band)
        np.testing.assert_allclose(vectors[low:high], expected, rtol=1e-10)


def test_which_projections_exist():
    names = {name: {key for key in built(name)[1]["params"] if "projections" in key} for name in VARIANTS}
    assert names["wt103 base"] == names["plain"] == set()
    assert names["wt103 large"] == {*(f"input_projections_{i}" for i in range(3)), "output_projections_0"}
    assert names["lm1b"] == {f"{kind}_projections_{i}" for kind in ("input", "output") for i in (1, 2)}
    assert names["one projection"] == names["projected plain"] == {"input_projections_0", "output_projections_0"}


def test_an_id_outside_the_table_is_not_a_number():
    module, variables = built("wt103 large")
    vectors = module.apply(variables, np.array([0, 4, 22, 23]))
    assert np.isnan(vectors).any(-1).tolist() == [False, False, False, True]


TARGETS = np.random.default_rng(2).integers(0, V, (B, K))
WEIGHTS = np.random.default_rng(3).integers(0, 3, (B, K)) / 2


def test_scores_are_exact():
    """All bands, one tail unused, none used, only the last, and a single position."""
    module, variables = built("wt103 large")
    score = jax.jit(lambda *arguments: module.apply(*arguments, method="score"))
    for targets in (TARGETS, TARGETS % 11, TARGETS % 5, 11 + TARGETS % 12, TARGETS[:, :1]):
        weights = WEIGHTS[:, : targets.shape[1]]
        hidden = np.random.default_rng(4).normal(size=(*targets.shape, D))
        with jax.enable_x64(True):
            scores = jax.device_get(score(variables, hidden, targets, weights))
        expected = naive_logits("wt103 large", variables["params"], hidden)
        nll = -np.take_along_axis(expected, targets[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(scores.nll, nll, rtol=1e-10)
        np.testing.assert_allclose(scores.total, (weights * nll).sum(), rtol=1e-10)
        np.testing.assert_array_equal(scores.best, expected.argmax(-1))


def test_the_best_token_is_found_in_every_band():
    """Hidden vectors that make one tail as a whole, or one token in it, the most probable."""
    module, variables = built("wt103 large")
    hidden = 3 * np.random.default_rng(5).normal(size=(4, 64, D))
    scores = jax.jit(lambda *arguments: module.apply(*arguments, method="score"))(
        variables, hidden, np.zeros((4, 64), int), np.ones((4, 64))
    )
    expected = naive_logits("wt103 large", variables["params"], hidden).argmax(-1)
    assert min(((expected >= low) & (expected < high)).sum() for low, high in bounds("wt103 large")) > 20
    np.testing.assert_array_equal(scores.best, expected)


@pytest.mark.parametrize("name", ["wt103 large", "one projection"])
def test_gradients_are_those_of_the_naive_softmax(name: str):
    module, variables = built(name)
    hidden = np.random.default_rng(4).normal(size=(B, K, D))

    def total(variables: Any, hidden: Any, weights: Any) -> jax.Array:
        return 3 * module.apply(variables, hidden, TARGETS, weights, method="score").total

    def naive(variables: Any, hidden: Any, weights: Any) -> jax.Array:
        log_probabilities = module.apply(variables, hidden, method="logits")
        return -3 * (weights * jnp.take_along_axis(log_probabilities, TARGETS[..., None], axis=-1)[..., 0]).sum()

    with jax.enable_x64(True):
        actual, expected = (
            jax.device_get(jax.jit(jax.grad(f, (0, 1, 2)))(variables, hidden, WEIGHTS)) for f in (total, naive)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), actual, expected)


def test_a_tail_is_computed_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    """Counted at run time: as many parts of a tail as the row with most of its targets needs."""
    calls: list[int] = []
    original = adaptive.token_scores

    def counted(hidden: jax.Array, *arguments: Any, **options: Any) -> Any:
        jax.debug.callback(lambda: calls.append(hidden.shape[-1]))
        return original(hidden, *arguments, **options)

    monkeypatch.setattr(adaptive, "token_scores", counted)
    module, variables = built("wt103 large")
    variables["params"]["tails"]["bias"] -= 100.0  # the most probable token is always in the head
    targets = np.zeros((2, 32), int)
    targets[0, [3, 30]], targets[1, [1, 5, 7, 8, 9]] = 7, 6  # a part has 2 positions

    def total(variables: Any) -> jax.Array:
        return module.apply(variables, jnp.ones((2, 32, D)), targets, jnp.ones((2, 32)), method="score").total

    jax.block_until_ready(jax.jit(jax.grad(total))(variables))
    jax.effects_barrier()
    assert sorted(calls) == [4, 4, 4, 8]  # by width: three parts of the first tail, none of the second, and the head


@pytest.mark.parametrize("penalties", [Penalties(label_smoothing=0.1), Penalties(z_loss=0.1)])
def test_penalties_are_only_of_the_plain_softmax(penalties: Penalties):
    hidden, targets, weights = np.ones((B, K, D), np.float32), np.zeros((B, K), np.int32), np.ones((B, K), np.float32)

    def total(name: str, penalties: Penalties) -> float:
        module, variables = built(name)
        return module.apply(variables, hidden, targets, weights, penalties, method="score").total

    assert total("plain", penalties) != total("plain", Penalties())
    with pytest.raises(ValueError, match=r"an adaptive softmax takes no Penalties.*: choose 0 for both, or no cutoffs"):
        total("wt103 base", penalties)
