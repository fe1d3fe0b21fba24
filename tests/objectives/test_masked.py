from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.objectives import row_keys, row_noise, sample
from ctx_jax.objectives.masked import GEOMETRIC, NGRAMS, Masked, favour_rare, sample_spans

Rows = Callable[..., Batch]
KINDS = {
    "tokens": Masked(),
    "whole_words": Masked(whole_words=True),
    "ngrams": Masked(whole_words=True, spans=NGRAMS),
    "spans": Masked(spans=GEOMETRIC),
    "rare": Masked(rarity=0.7),
}


spans_of = jax.jit(sample_spans, static_argnames="frequencies")


@partial(jax.jit, static_argnames=("objective", "vocabulary", "seed"))
def prepare(objective: Masked, batch: Batch, vocabulary: Vocabulary, seed: int = 0) -> Batch:
    keys = row_keys(seed, batch["epoch"], batch["example"], objective.copies)
    return objective.prepare(batch, keys, vocabulary)


def chosen_of(batch: Batch) -> np.ndarray:
    """[B, T] bool: the predicted positions."""
    chosen = np.zeros(batch["tokens"].shape, bool)
    rows, slots = np.nonzero(np.asarray(batch["target_weights"]))
    chosen[rows, np.asarray(batch["target_positions"])[rows, slots]] = True
    return chosen


def likely(count: float, trials: float, p: float) -> bool:
    """Binomial bound of 4.5 standard deviations."""
    return abs(count - trials * p) <= 4.5 * (trials * p * (1 - p)) ** 0.5


def test_counts_by_hand():
    """Half to even of the float64 product: 0.15 * 10 = 1.5 -> 2, 0.15 * 30 = 4.5 -> 4 (half up would say 5)."""
    counts = Masked(max_predictions=76).counts(512)
    expected = {0: 0, 1: 1, 3: 1, 9: 1, 10: 2, 16: 2, 17: 3, 30: 4, 50: 8, 70: 10, 100: 15, 128: 19, 506: 76, 512: 76}
    assert {n: int(counts[n]) for n in expected} == expected
    assert int(Masked(max_predictions=20).counts(140)[140]) == 20  # 21 without the cap
    assert int(Masked(max_predictions=600).counts(512)[512]) == 77


@pytest.fixture(scope="module")
def short(make_rows: Rows) -> Batch:
    """Rows of 5 to 64 positions, one of them padding. All shapes here are alike, because compiling is what costs."""
    rows = make_rows(256, 64, text=(5, 64))
    rows["documents"][7] = rows["words"][7] = rows["tokens"][7] = 0
    return rows | {"counts": np.float32(rows["tokens"] % 5)}


@pytest.fixture(scope="module")
def full(make_rows: Rows) -> Batch:
    """The same shapes without padding."""
    return make_rows(256, 64)


def visits(rows: Batch, count: int) -> list[Batch]:
    return [{**rows, "epoch": np.full_like(rows["epoch"], epoch)} for epoch in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_is_masked_and_as_much_as_asked(kind: str, vocabulary: Vocabulary, short: Batch):
    rows = short
    batch = prepare(KINDS[kind], rows, vocabulary)
    chosen, text = chosen_of(batch), rows["words"] > 0
    assert batch["target_positions"].shape == (256, 10)  # round(0.15 * 64), not the cap
    assert not (chosen & ~text).any()
    np.testing.assert_array_equal(np.asarray(batch["tokens"])[~chosen], rows["tokens"][~chosen])
    np.testing.assert_array_equal(chosen.sum(1), np.asarray(batch["target_weights"]).sum(1))  # no position twice
    np.testing.assert_array_equal(
        batch["targets"], np.take_along_axis(rows["tokens"], np.asarray(batch["target_positions"]), 1)
    )
    assert not chosen[7].any()
    asked = np.array([0 if n == 0 else min(76, max(1, round(0.15 * n))) for n in (rows["documents"] > 0).sum(1)])
    if KINDS[kind].whole_words:
        assert (chosen.sum(1) <= asked).all()
        assert (chosen.sum(1) == asked).mean() > 0.9  # the rest had no word small enough
    else:
        np.testing.assert_array_equal(chosen.sum(1), asked)


@pytest.mark.parametrize("kind", ["tokens", "whole_words", "spans"])
def test_eighty_ten_ten_of_each_piece(kind: str, vocabulary: Vocabulary, full: Batch):
    batches = [prepare(KINDS[kind], rows, vocabulary) for rows in visits(full, 5)]
    chosen = np.concatenate([chosen_of(batch) for batch in batches])
    tokens = np.concatenate([np.asarray(batch["tokens"]) for batch in batches])
    shown, own = tokens[chosen], np.tile(full["tokens"], (5, 1))[chosen]
    total = chosen.sum()
    assert total > 12000
    # a random token is the mask, or the own one, once in 50 times
    assert likely((shown == vocabulary.mask).sum(), total, 0.8 + 0.1 / 50)
    assert likely((shown == own).sum(), total, 0.1 + 0.1 / 50)
    other = shown[(shown != vocabulary.mask) & (shown != own)]
    assert likely(len(other), total, 0.1 * 48 / 50)
    assert set(other.tolist()) == set(range(50)) - {vocabulary.mask}  # the whole vocabulary, special tokens included
    # neighbours are drawn apart, also within a word
    pairs = chosen[:, 1:] & chosen[:, :-1]
    masked = tokens == vocabulary.mask
    assert likely((masked[:, 1:] & masked[:, :-1] & pairs).sum(), pairs.sum(), 0.802**2)


def test_every_piece_of_text_is_masked_equally_often(vocabulary: Vocabulary, full: Batch):
    chosen = np.concatenate([chosen_of(prepare(Masked(), rows, vocabulary)) for rows in visits(full, 8)])
    assert (chosen.sum(1) == 10).all()  # round(9.6)
    text = full["words"][0] > 0
    assert text.sum() == 61
    assert all(likely(count, 8 * 256, 10 / 61) for count in chosen.sum(0)[text])
    assert not chosen.sum(0)[~text].any()


@pytest.mark.parametrize("count", [1, 2])
def test_rare_tokens_are_drawn_in_proportion(count: int):
    """By hand: one position after another, each with the share that its count^-0.7 has of what is left; a token that
    the text does not have counts as one that it has once, and what is no candidate is never drawn."""
    counts = np.array([0, 3, 40, 1, 10**9, 5], np.float32)
    candidates = np.array([True, True, True, True, True, False])
    weights = np.array([1, 3, 40, 1, 10**9]) ** -0.7
    first = weights / weights.sum()
    second = [sum(first[j] * weights[i] / (weights.sum() - weights[j]) for j in range(5) if j != i) for i in range(5)]
    trials = 40_000
    noise = jax.random.bits(jax.random.key(0), (trials, 6), jnp.uint32)
    draw = jax.vmap(lambda noise: sample(favour_rare(noise, counts, 0.7), candidates, count))
    chosen = np.asarray(draw(noise))
    assert (chosen.sum(1) == count).all() and not chosen[:, 5].any()
    expected = first if count == 1 else first + second
    assert all(likely(drawn, trials, p) for drawn, p in zip(chosen.sum(0), expected, strict=False))


@pytest.mark.parametrize("kind", ["whole_words", "ngrams"])
def test_words_are_masked_whole(kind: str, vocabulary: Vocabulary, full: Batch):
    chosen = chosen_of(prepare(KINDS[kind], full, vocabulary))
    for row, words in zip(chosen, full["words"], strict=True):
        for word in np.unique(words[row]):
            assert row[words == word].all()


def test_a_word_that_would_overshoot_is_passed_over():
    words = jnp.array([0, 1, 1, 1, 2, 3, 3, 4, 4, 4])
    ascending = jnp.arange(10, dtype=jnp.uint32) * 1000  # the words come in their own order
    zeros = jnp.zeros(10, jnp.uint32)

    def taken(count: int, order: jax.Array = ascending) -> list[int]:
        chosen = spans_of(order, zeros, words, jnp.int32(count), (1.0,))
        return sorted(set(np.asarray(words)[np.asarray(chosen)].tolist()))

    assert taken(0) == []
    assert taken(1) == [2]
    assert taken(2) == [2]  # 1 passed over, then 2; 3 would overshoot
    assert taken(3) == [1]
    assert taken(5) == [1, 2]  # neither 3 nor 4 fits into the one that is left
    assert taken(6) == [1, 2, 3]
    assert taken(9) == [1, 2, 3, 4]
    assert taken(100) == [1, 2, 3, 4]
    assert taken(5, ascending[::-1]) == [3, 4]


def test_spans_by_hand():
    """Words 1-3, a separator, words 4-7; every span is of three words; the order is 2, 3, 6, 1, ..."""
    words = jnp.array([0, 1, 2, 2, 3, 0, 4, 5, 6, 6, 7, 0])
    order = jnp.array([4, 1, 2, 5, 6, 3, 7, 0, 0, 0, 0, 0], jnp.uint32) * 1000
    zeros = jnp.zeros(12, jnp.uint32)

    def taken(count: int) -> list[int]:
        chosen = spans_of(order, zeros, words, jnp.int32(count), (0.0, 0.0, 1.0))
        return sorted(set(np.asarray(words)[np.asarray(chosen)].tolist()))

    assert taken(2) == [2]  # shortened to what fits
    assert taken(3) == [2, 3]  # stops before the separator
    assert taken(4) == [1, 2, 3]  # 3 is taken, 6 too large, 1 fits and stops before 2
    assert taken(5) == [2, 3, 6]  # 6 fits, 7 no more
    assert taken(6) == [2, 3, 6, 7]
    assert taken(7) == [1, 2, 3, 6, 7]
    assert taken(8) == [1, 2, 3, 4, 6, 7]


def test_words_of_single_tokens_are_chosen_as_tokens_are(vocabulary: Vocabulary):
    noise = row_noise(row_keys(5, 0, np.arange(50)), (40,))
    words = jnp.arange(1, 41)
    by_words = jax.jit(jax.vmap(lambda n: sample_spans(n, n, words, jnp.int32(6), (1.0,))))(noise)
    np.testing.assert_array_equal(by_words, jax.jit(jax.vmap(lambda n: sample(n, words > 0, 6)))(noise))


@pytest.mark.parametrize("frequencies", [NGRAMS, GEOMETRIC])
def test_lengths_of_spans(frequencies: tuple[float, ...]):
    """The word in the middle comes first, so that its span is shortened neither by others nor by the count."""
    noise = row_noise(row_keys(1, 0, np.arange(4000)), (40,))
    words, place = jnp.arange(1, 41), 15
    order = (jnp.arange(1, 41, dtype=jnp.uint32) << 8).at[place].set(0)
    chosen = np.asarray(jax.jit(jax.vmap(lambda n: sample_spans(order, n, words, jnp.int32(10), frequencies)))(noise))
    lengths = []
    for row in chosen:
        end = place
        while row[end]:
            end += 1
        lengths.append(end - place)
    counts = np.bincount(lengths, minlength=len(frequencies) + 1)[1:]
    assert counts.sum() == 4000
    for count, frequency in zip(counts, frequencies, strict=True):
        assert likely(count, 4000, frequency / sum(frequencies))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_corruption_depends_on_the_row_alone(kind: str, vocabulary: Vocabulary, short: Batch):
    whole = prepare(KINDS[kind], short, vocabulary)
    places = np.random.default_rng(0).integers(0, 256, 256)
    places[:128] = places[128:]  # other rows beside it, in other places, some of them twice
    mixed = prepare(KINDS[kind], {name: value[places] for name, value in short.items()}, vocabulary)
    for name, value in mixed.items():
        np.testing.assert_array_equal(value, np.asarray(whole[name])[places])


@pytest.mark.parametrize("kind", ["tokens", "ngrams", "rare"])
def test_batch_size_jit_and_wide_numbers_change_nothing(kind: str, vocabulary: Vocabulary, short: Batch):
    few = {name: value[3:9] for name, value in short.items()}
    compiled = prepare(KINDS[kind], short, vocabulary)
    with jax.enable_x64(True):
        plain = KINDS[kind].prepare(few, row_keys(0, few["epoch"], few["example"]), vocabulary)
    for name, value in compiled.items():
        np.testing.assert_array_equal(plain[name], value[3:9])
        assert plain[name].dtype == value.dtype


def test_dynamic_and_static_masking(vocabulary: Vocabulary, full: Batch):
    """Static: the step makes its keys with `copies` (`row_keys`), which repeats the first epochs."""
    dynamic = [np.asarray(prepare(Masked(), rows, vocabulary)["tokens"]) for rows in visits(full, 4)]
    assert all((dynamic[i] != dynamic[j]).any(axis=1).all() for i in range(4) for j in range(i))
    static = [np.asarray(prepare(Masked(copies=2), rows, vocabulary)["tokens"]) for rows in visits(full, 4)]
    for epoch in range(4):
        np.testing.assert_array_equal(static[epoch], dynamic[epoch % 2])


def pairs(make_rows: Rows) -> Batch:
    rows = make_rows(6, 16)
    rows["relation"] = (np.arange(6) % 2).astype(np.int32)
    rows["documents"][-1] = rows["words"][-1] = rows["tokens"][-1] = 0
    return rows


def test_relation_by_hand(vocabulary: Vocabulary, make_rows: Rows, table_model: Any):
    """Every real row begins with [CLS] = 4, so all get the logits table[4, :2] = (0, log 3): label 1 has 3/4."""
    rows = pairs(make_rows)  # five real rows: labels 0 1 0 1 0
    table = jnp.zeros((50, 50)).at[4, 1].set(jnp.log(3.0))
    objective = Masked(relation=2.0)
    batch = prepare(objective, rows, vocabulary)
    output = objective.loss(table_model(), {"table": table}, batch, None, None)
    counts = objective.weights(batch)
    assert {name: float(count) for name, count in counts.items()} == {"lm": 10, "relation": 5}
    assert [float(x) for x in output.metrics["relation_accuracy"]] == [2, 5]
    np.testing.assert_allclose(output.totals["relation"], 2 * (3 * np.log(4) + 2 * np.log(4 / 3)), rtol=1e-6)
    np.testing.assert_allclose(output.totals["lm"], 10 * np.log(50), rtol=1e-6)  # none of the targets is [CLS]
    alone = replace(objective, relation=0.0)
    assert (
        set(alone.weights(batch))
        == set(alone.loss(table_model(), {"table": table}, batch, None, None).totals)
        == {"lm"}
    )


def test_micro_batches_add_up(vocabulary: Vocabulary, make_rows: Rows, table_model: Any):
    objective = Masked(relation=1.0)
    batch = prepare(objective, pairs(make_rows), vocabulary)
    parts = [{name: value[b::2] for name, value in batch.items()} for b in range(2)]
    count = objective.weights(batch)
    assert all(sum(objective.weights(part)[name] for part in parts) == count[name] for name in count)

    @jax.jit
    @jax.value_and_grad
    def mean(table: jax.Array, part: Batch) -> jax.Array:
        totals = objective.loss(table_model(), {"table": table}, part, None, None).totals
        return sum((totals[name] / count[name] for name in totals), jnp.float32(0))

    table = jax.random.normal(jax.random.key(2), (50, 50))
    value, gradient = mean(table, batch)
    values, gradients = zip(*(mean(table, part) for part in parts), strict=True)
    np.testing.assert_allclose(sum(values), value, rtol=1e-6)
    np.testing.assert_allclose(sum(gradients), gradient, atol=1e-7)


def test_a_reader_without_pairs_is_refused(vocabulary: Vocabulary, make_rows: Rows):
    with pytest.raises(ValueError, match="needs 'relation' in the batch: choose a reader of pairs"):
        prepare(Masked(relation=1.0), make_rows(2, 16), vocabulary)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0.0}, "rate 0.0"),
        ({"rate": 1.5}, "rate 1.5"),
        ({"max_predictions": 0}, "max_predictions 0"),
        ({"mask": 0.8, "random": 0.3}, "mask 0.8 and random 0.3"),
        ({"spans": ()}, r"spans \(\)"),
        ({"spans": (0.0, 0.0)}, "spans"),
        ({"copies": 0}, "copies 0"),
        ({"relation": -1.0}, "relation -1.0"),
        ({"rarity": -0.7}, "rarity -0.7"),
        ({"rarity": float("nan")}, "rarity nan"),
        ({"rarity": 0.7, "whole_words": True}, "rarity 0.7 is of single pieces"),
        ({"rarity": 0.7, "spans": NGRAMS}, "rarity 0.7 is of single pieces"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Masked(**fields)
