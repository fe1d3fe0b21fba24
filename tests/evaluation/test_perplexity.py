from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.data.readers import Blocks, Lanes
from ctx_jax.evaluation.ngrams import transitions
from ctx_jax.evaluation.perplexity import Sums, accumulate, declare, evaluate, measure
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.segment import Segment

VOCABULARY = Vocabulary(size=20, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
# 10 predictions in documents
STORE: Any = SimpleNamespace(tokens=np.arange(7, 19), document_bytes=np.array([20, 12]), vocabulary=VOCABULARY)


def reader_of(**fields: Any) -> Any:
    return SimpleNamespace(**{"length": 4, "stride": None, "join_documents": False, **fields})


def step(variables: Any, memory: Any, batch: Any) -> tuple[Any, Any]:
    """Each token costs its value, plus what the memory holds; weight 0 is not predicted."""
    nll = jnp.asarray(batch["nll"], jnp.float32) * variables["scale"] + memory
    weights = jnp.asarray(batch["weights"], jnp.float32)
    count = weights.sum()
    metrics = {
        "nll": ((weights * nll).sum(), count),
        "nll_squared": ((weights * nll**2).sum(), count),
        "accuracy": ((weights * (nll < 2)).sum(), count),
    }
    return {"terms": {"lm": metrics["nll"]}, "metrics": metrics}, memory


def sums_of(total: float, count: float, squares: float = 100.0, **others: tuple[float, float]) -> Sums:
    metrics = {"nll": (total, count), "nll_squared": (squares, count), **others}
    return {"terms": {"lm": metrics["nll"]}, "metrics": metrics}


def batches_of(nll: list[float], size: int) -> list[dict[str, np.ndarray]]:
    padded = np.pad(nll, (0, -len(nll) % size)).reshape(-1, size)
    weights = (np.arange(padded.size) < len(nll)).reshape(padded.shape)
    return [{"nll": row[None], "weights": weight[None]} for row, weight in zip(padded, weights, strict=True)]


NLL = [1.0, 3.0, 1.0, 1.0, 2.5, 0.5, 3.0, 1.0, 5.0, 2.0]  # sum 20, mean 2, squared deviations 17.5


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_sums_over_uneven_batches_are_divided_once(size: int):
    result = evaluate(
        step,
        {"scale": 1.0},
        jnp.zeros(()),
        batches_of(NLL, size),
        objective=Causal(),
        reader=reader_of(stride=2),
        store=STORE,
    )
    assert result == {
        "reader": "SimpleNamespace",
        "target_length": 4,
        "stride": 2,
        "memory_length": 0,
        "loss": pytest.approx(2.0),
        "tokens": 10,
        "nll": pytest.approx(2.0),
        "standard_error": pytest.approx(math.sqrt(17.5 / 9 / 10)),
        "perplexity": pytest.approx(math.exp(2)),
        "bits_per_byte": pytest.approx(20 / math.log(2) / 32),
        "accuracy": pytest.approx(0.5),
    }


def test_memory_goes_from_batch_to_batch():
    def counting(variables: Any, memory: Any, batch: Any) -> tuple[Any, Any]:
        return (memory, jnp.float32(1)), memory + 1

    assert accumulate(counting, {}, jnp.float32(3), [{}] * 4) == (3 + 4 + 5 + 6, 4)


def test_sums_are_wider_than_float32():
    def counting(variables: Any, memory: Any, batch: Any) -> tuple[Any, Any]:
        return batch, memory

    batches: Any = [jnp.float32(value) for value in (2**24, 1, 1)]  # in float32, 2^24 + 1 + 1 = 2^24
    assert accumulate(counting, {}, None, batches) == 2**24 + 2


def test_bits_per_byte_need_every_text_token():
    def result(count: float, **fields: Any) -> dict[str, Any]:
        return measure(sums_of(20.0, count), Segment(), reader_of(**fields), STORE)

    assert "bits_per_byte" in result(10)
    assert "bits_per_byte" not in result(9)  # a pass cut short
    assert "bits_per_byte" not in result(11)  # a token counted twice
    assert "bits_per_byte" in result(11, join_documents=True)
    assert "bits_per_byte" not in result(10, join_documents=True)


def test_text_that_the_tokenizer_does_not_know_has_no_bits_per_byte():
    """A text with "<unk>" for its rare words would seem easy."""
    tokens = STORE.tokens.copy()
    tokens[[2, 5]] = STORE.vocabulary.unknown
    result = measure(sums_of(20.0, 10), Segment(), reader_of(), SimpleNamespace(**vars(STORE) | {"tokens": tokens}))
    assert result["unknown"] == 2
    assert "bits_per_byte" not in result
    assert "unknown" not in measure(sums_of(20.0, 10), Segment(), reader_of(), STORE)


def test_masked_objectives_report_targets_and_no_perplexity():
    sums = sums_of(20.0, 10.0, 40.0, accuracy=(4.0, 10.0), relation_accuracy=(1.0, 2.0), empty=(0.0, 0.0))
    sums["terms"]["relation"] = (1.0, 2.0)
    assert measure(sums, Masked(), reader_of(), STORE) == {
        "loss": 2.5,
        "lm": 2.0,
        "relation": 0.5,
        "targets": 10,
        "nll": 2.0,
        "standard_error": 0.0,  # all squares are 4
        "accuracy": 0.4,
        "relation_accuracy": 0.5,
    }


@pytest.mark.parametrize(
    ("reader", "batch_size", "objective"),
    [
        (Blocks(length=8), 3, Causal()),
        (Blocks(length=8, stride=3), 3, Causal()),
        (Blocks(length=8, stride=1), 7, Causal()),
        (Lanes(length=8), 1, Segment()),
        (Lanes(length=8, stride=4), 3, Segment()),
        (Blocks(length=8, join_documents=True), 3, Causal()),
    ],
)
def test_every_reader_scores_each_token_once(reader: Any, batch_size: int, objective: Any):
    """A model that looks one token back loses the same, however the text is read."""
    rng = np.random.default_rng(0)
    sizes = [9, 30, 4, 16]
    tokens = rng.integers(7, 20, sum(sizes)).astype(np.uint16)
    offsets = np.cumsum([0, *sizes])
    tokens[offsets[:-1]], tokens[offsets[1:] - 1] = 2, 3
    vocabulary = Vocabulary(size=20, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
    store: Any = SimpleNamespace(
        vocabulary=vocabulary,
        tokens=tokens,
        flags=np.zeros(len(tokens), np.uint8),
        offsets=offsets,
        document_bytes=np.array([30, 100, 7, 50]),
    )
    table = rng.uniform(1, 5, (20, 20))

    def looks_back(variables: Any, memory: Any, batch: Any) -> tuple[Any, Any]:
        previous, targets = transitions(batch)
        nll, count = table[previous, targets], len(targets)
        metrics = {"nll": (nll.sum(), count), "nll_squared": ((nll**2).sum(), count)}
        return {"terms": {"lm": metrics["nll"]}, "metrics": metrics}, None

    count = reader.passes(store, batch_size)
    batches = [reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=None) for n in range(count)]
    result = evaluate(looks_back, {}, None, batches, objective=objective, reader=reader, store=store)
    pairs = table[tokens[:-1], tokens[1:]]
    expected = pairs if reader.join_documents else np.delete(pairs, offsets[1:-1] - 1)
    assert result["tokens"] == len(expected)
    assert result["nll"] == pytest.approx(expected.mean())
    assert result["standard_error"] == pytest.approx(expected.std(ddof=1) / math.sqrt(len(expected)))
    assert result["bits_per_byte"] == pytest.approx(expected.sum() / math.log(2) / 187)
    assert result["stride"] == (reader.stride or 8)


def test_how_a_split_was_read_is_declared():
    assert declare(Lanes(length=16, pairs=True), 24) == {
        "reader": "Lanes",
        "target_length": 16,
        "stride": 8,
        "memory_length": 24,
    }
    assert declare(reader_of(), 7) == {
        "reader": "SimpleNamespace",
        "target_length": 4,
        "stride": 4,
        "memory_length": 7,
    }


def test_a_perplexity_beyond_floats_is_left_out():
    result = measure(sums_of(8000.0, 10.0), Causal(), reader_of(), STORE)
    assert result["nll"] == 800 and "perplexity" not in result


def test_nothing_predicted_is_an_error():
    with pytest.raises(ValueError, match="evaluation has no batch"):
        accumulate(step, {}, None, [])
    with pytest.raises(ValueError, match="evaluation predicted nothing"):
        measure(sums_of(0.0, 0.0), Causal(), reader_of(), STORE)
