"""Rows as a reader gives them, and models small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Batch, ModelOutput, Penalties, TokenScores, Vocabulary

VOCABULARY = Vocabulary(size=50, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return VOCABULARY


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., Batch]:
    """rows(count, length, text=(low, high), classification="first" or "last"): [CLS] A [SEP] B [SEP] and padding, or
    A [SEP] B [SEP] [CLS]; words of 1 to 4 pieces; `text` bounds the number of positions that are no padding."""

    def rows(count: int, length: int, text: tuple[int, int] | None = None, classification: str = "first") -> Batch:
        generator = np.random.default_rng(length)
        tokens, words, documents = (np.zeros((count, length), np.int32) for _ in range(3))
        for row in range(count):
            filled = length if text is None else int(generator.integers(text[0], text[1] + 1))
            special = {0: 4, filled // 2: 5, filled - 1: 5}
            if classification == "last":
                special = {filled // 2: 5, filled - 2: 5, filled - 1: 4}
            sizes = generator.integers(1, 5, length)
            numbers = np.repeat(np.arange(1, length + 1), sizes)[:filled]
            # a word does not go on behind a separator
            numbers = numbers + (np.arange(filled) > filled // 2)
            for place, token in special.items():
                tokens[row, place], numbers[place] = token, 0
            is_text = numbers > 0
            words[row, :filled][is_text] = np.unique(numbers[is_text], return_inverse=True)[1] + 1
            tokens[row, :filled][is_text] = generator.integers(7, 50, int(is_text.sum()))
            documents[row, :filled] = 1
        example = np.arange(count, dtype=np.int32)
        return {
            "tokens": tokens,
            "documents": documents,
            "positions": np.tile(np.arange(length, dtype=np.int32), (count, 1)),
            "words": words,
            "example": example,
            "epoch": np.zeros_like(example),
        }

    return rows


class TableModel:
    """Logits = table[token]; memory = number of windows seen; pooled = table of the first token, whose first two
    entries classify pairs. With `query`, what predicts stands in a query stream."""

    def __init__(self, query: bool = False) -> None:
        self.query = query

    def apply(self, variables: Any, *arguments: Any, key: Any = None, method: str = "__call__") -> Any:
        return getattr(self, method)(variables, *arguments)

    def __call__(self, variables: Any, batch: Batch, memory: Any) -> ModelOutput:
        hidden = variables["table"][batch["tokens"]]
        query = -hidden[:, : batch["targets"].shape[1]] if self.query else None
        return ModelOutput(hidden, None if memory is None else memory + 1, hidden[:, 0], query)

    def score(
        self, variables: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties
    ) -> TokenScores:
        log_probabilities, log_normalizer = jax.nn.log_softmax(hidden), jax.nn.logsumexp(hidden, axis=-1)
        nll = -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
        e, c = penalties.evenly(hidden.shape[-1]), penalties.z_loss
        cost = (1 - e) * nll - e * log_probabilities.mean(-1) + c * log_normalizer**2
        return TokenScores((weights * cost).sum(), nll, log_normalizer, hidden.argmax(-1))

    def classify(self, variables: Any, pooled: jax.Array) -> jax.Array:
        return pooled[:, :2]


@pytest.fixture(scope="session")
def table_model() -> type[TableModel]:
    return TableModel
