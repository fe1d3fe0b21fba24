"""GPT's fine-tuning: the auxiliary loss and both orders of a pair, against what the model says of each order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.data.examples import Examples
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.objectives.supervised import Supervised
from ctx_jax.transfer.inputs import template

V = Vocabulary(size=20, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
ONE = Vocabulary(size=20, pad=0, unknown=0, begin=0, end=0, classification=0, separator=0, mask=0)
CONFIG = GptConfig(
    vocabulary_size=20, vocabulary_multiple=8, width=16, layers=1, heads=2, feed_forward=32, max_length=16, classes=3
)
EXAMPLES: Any = Examples()
PAIRS = [([10, 11, 12], [13, 14]), ([15], [16, 17, 18, 19])]


def encoded(ids: list[int]) -> Encoding:
    return Encoding("x" * len(ids), np.array(ids, np.int32), np.arange(len(ids)))


def batch_of(config: GptConfig, vocabulary: Vocabulary, objective: Supervised, swap: bool = False) -> dict[str, Any]:
    """The two pairs and a row of padding, prepared."""
    form = template(config, vocabulary, head=True, both_orders=objective.both_orders)
    rows = [form.row([encoded(ids) for ids in (pair[::-1] if swap else pair)], 12) for pair in PAIRS]
    labels, example = np.array([2, 0, 0], np.int32), np.array([0, 1, -1], np.int32)
    batch = {**form.batch(rows, 3, 12), "labels": labels, "example": example}
    return objective.prepare(batch, None, vocabulary)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def tiny() -> tuple[GptConfig, Vocabulary, Any, Any]:
    config = replace(CONFIG, task_tokens=True)
    model, batch = config.build(), batch_of(config, ONE, Supervised())
    params = jax.jit(lambda: model.init(jax.random.key(0), batch, method="initialize"))()
    return config, ONE, model, jax.tree.map(lambda x: 5 * x, params)  # far from uniform


@pytest.mark.parametrize(
    ("config", "vocabulary", "special"),
    [(CONFIG, V, (2, 5, 4)), (replace(CONFIG, task_tokens=True), ONE, (20, 21, 22))],
)
def test_rows_have_start_delimiter_and_extract_token(config, vocabulary, special):
    start, delimiter, extract = special
    tokens = batch_of(config, vocabulary, Supervised(both_orders=True))
    assert tokens["tokens"][0].tolist() == [start, 10, 11, 12, delimiter, 13, 14, extract, 0, 0, 0, 0]
    assert tokens["swapped_tokens"][0].tolist() == [start, 13, 14, delimiter, 10, 11, 12, extract, 0, 0, 0, 0]


def test_the_auxiliary_loss_is_of_the_tokens_of_text(tiny):
    config, vocabulary, model, variables = tiny
    assert variables["params"]["task_tokens"]["embedding"].unbox().shape == (3, 16)
    objective = Supervised(language_model=0.5, both_orders=True)
    batch = batch_of(config, vocabulary, objective)
    counts = objective.weights(batch)
    assert {name: float(count) for name, count in counts.items()} == {"task": 2.0, "lm": 20.0}
    found = objective.loss(model, variables, batch, None, None)
    expected = 0.0
    for prefix in ("", "swapped_"):
        tokens = batch[prefix + "tokens"]
        rows = {name: batch[prefix + name] for name in ("tokens", "documents", "positions")}
        hidden = model.apply(variables, rows).hidden
        logits = np.asarray(model.apply(variables, hidden, method="logits"), np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row in (0, 1):
            expected -= sum(logs[row, t - 1, tokens[row, t]] for t in range(1, 12) if 10 <= tokens[row, t] < 20)
    np.testing.assert_allclose(found.totals["lm"], 0.5 * expected, rtol=1e-5)
    plain = Supervised(both_orders=True).loss(model, variables, batch, None, None)
    assert set(plain.totals) == {"task"}
    np.testing.assert_allclose(found.totals["task"], plain.totals["task"], rtol=1e-6)


def test_the_vectors_of_both_orders_are_added_before_the_head(tiny):
    config, vocabulary, model, variables = tiny
    objective = Supervised(both_orders=True)
    batch = batch_of(config, vocabulary, objective)
    found = objective.scores(model, variables, batch, None)
    orders = [batch_of(config, vocabulary, Supervised(), swap) for swap in (False, True)]
    vectors = [model.apply(variables, order).pooled for order in orders]
    np.testing.assert_allclose(found, model.apply(variables, vectors[0] + vectors[1], method="classify"), rtol=1e-5)
    other = objective.scores(model, variables, batch_of(config, vocabulary, objective, swap=True), None)
    np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, objective.scores(model, variables, batch, jax.random.key(0)))  # dropout


def test_what_does_not_fit():
    (line,) = Supervised(language_model=0.5).requirements(BertConfig(), EXAMPLES)
    assert "objective.language_model 0.5 needs a causal model, and in BertConfig tokens see those" in line
    assert not list(Supervised(language_model=0.5).requirements(CONFIG, EXAMPLES))
    with pytest.raises(ValueError, match="language_model -1 rewards bad predictions: choose 0 or more"):
        Supervised(language_model=-1)
    form = template(CONFIG, V, head=True, both_orders=True)
    with pytest.raises(ValueError, match=r"objective.both_orders needs pairs, and the task has one text: leave it out"):
        form.row([encoded([10])], 12)
    batch = {"documents": jnp.ones((1, 2)), "labels": jnp.zeros(1, jnp.int32)}
    with pytest.raises(ValueError, match="needs 'swapped_tokens' in the batch: choose a task of pairs"):
        Supervised(both_orders=True).scores(None, {}, batch, None)
