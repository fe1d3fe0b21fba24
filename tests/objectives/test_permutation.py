from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.layers.masks import within
from ctx_jax.objectives import row_keys, row_noise, sample_lengths
from ctx_jax.objectives.permutation import Permutation

Rows = Callable[..., Batch]
SMALL = Permutation(num_predict=11, perm_size=32)


@partial(jax.jit, static_argnames=("objective", "vocabulary", "seed"))
def prepare(objective: Permutation, batch: Batch, vocabulary: Vocabulary, seed: int = 0) -> Batch:
    keys = row_keys(seed, batch["epoch"], batch["example"], objective.copies)
    return objective.prepare(batch, keys, vocabulary)


@pytest.fixture(scope="module")
def windows(make_rows: Rows) -> Batch:
    """128 windows A SEP B SEP CLS of 64 positions: two blocks of 32."""
    return make_rows(128, 64, classification="last")


def chosen_of(batch: Batch) -> np.ndarray:
    chosen = np.zeros(batch["tokens"].shape, bool)
    rows, slots = np.nonzero(np.asarray(batch["target_weights"]))
    chosen[rows, np.asarray(batch["target_positions"])[rows, slots]] = True
    return chosen


def likely(count: float, trials: float, p: float) -> bool:
    """Binomial bound of 4.5 standard deviations."""
    return abs(count - trials * p) <= 4.5 * (trials * p * (1 - p)) ** 0.5


def published_block(order: np.ndarray, target: np.ndarray, special: np.ndarray) -> np.ndarray:
    """[P, P] bool: what is blocked inside one block, as the published code has it, before h sees itself."""
    ordered = target | special
    rank = np.where(ordered, order, -1)
    seeing = np.where(target, rank, rank + 1)
    return np.array([[ordered[j] and seeing[i] <= rank[j] for j in range(len(order))] for i in range(len(order))])


def test_the_published_mask_by_hand():
    """Tokens t T t T t CLS."""
    target = np.array([0, 1, 0, 1, 0, 0], bool)
    special = np.array([0, 0, 0, 0, 0, 1], bool)
    blocked = published_block(np.array([2, 4, 0, 1, 5, 3]), target, special)
    columns = [set(np.flatnonzero(row)) for row in blocked]
    assert columns == [{1, 3, 5}, {1}, {1, 3, 5}, {1, 3, 5}, {1, 3, 5}, {1}]


def test_ranks_say_what_the_published_mask_says(vocabulary: Vocabulary, windows: Batch):
    batch = prepare(SMALL, windows, vocabulary)
    content, query = (np.asarray(within(batch["ranks"], None, batch["ranks"] - n))[:, 0] for n in (0, 1))
    ranks, chosen = np.asarray(batch["ranks"]), chosen_of(batch)
    special = np.isin(windows["tokens"], (vocabulary.separator, vocabulary.classification))
    halves = slice(0, 32), slice(32, 64)
    for row in range(20):
        expected = np.ones((64, 64), bool)
        expected[32:, :32] = False  # the second half sees the first whole, the first never the second
        for half in halves:
            expected[half, half] = published_block(ranks[row, half], chosen[row, half], special[row, half])
        # h: what is not blocked, and itself
        np.testing.assert_array_equal(content[row], ~expected | np.eye(64, dtype=bool))
        # g, computed at the targets alone: what is not blocked
        np.testing.assert_array_equal(query[row][chosen[row]], ~expected[chosen[row]])


def test_orders_are_drawn_inside_each_block(vocabulary: Vocabulary, windows: Batch):
    batch = prepare(SMALL, windows, vocabulary)
    ranks, chosen = np.asarray(batch["ranks"]), chosen_of(batch)
    ordered = chosen | np.isin(windows["tokens"], (vocabulary.separator, vocabulary.classification))
    np.testing.assert_array_equal(ranks[:, :32][~ordered[:, :32]], 0)
    np.testing.assert_array_equal(ranks[:, 32:][~ordered[:, 32:]], 33)
    assert ((ranks[:, :32] > 0) == ordered[:, :32]).all() and (ranks[:, :32] <= 32).all()
    assert ((ranks[:, 32:] > 33) == ordered[:, 32:]).all() and (ranks[:, 32:] <= 65).all()
    before = trials = 0
    for row in range(128):
        placed = ranks[row][ordered[row]]
        assert len(set(placed.tolist())) == len(placed)
        # SEP and CLS end each row: either comes first equally often
        before += ranks[row, 62] < ranks[row, 63]
        trials += 1
    assert likely(before, trials, 0.5)


@pytest.mark.parametrize("whole_words", [False, True])
def test_targets_are_text_and_as_many_as_asked(whole_words: bool, vocabulary: Vocabulary, windows: Batch):
    batch = prepare(Permutation(num_predict=11, perm_size=32, whole_words=whole_words), windows, vocabulary)
    chosen = chosen_of(batch)
    assert batch["target_positions"].shape == (128, 11)
    assert (np.asarray(batch["target_weights"]) == 1).all()
    assert (chosen[:, :32].sum(1) == 6).all() and (chosen[:, 32:].sum(1) == 5).all()  # so that all are distinct
    assert not chosen[windows["words"] == 0].any()
    np.testing.assert_array_equal(batch["tokens"], windows["tokens"])
    np.testing.assert_array_equal(np.asarray(batch["targets"]).ravel(), windows["tokens"][chosen])  # its own token


def test_too_little_text_leaves_places_unused(vocabulary: Vocabulary, windows: Batch):
    rows = {name: value.copy() for name, value in windows.items()}
    for name in ("tokens", "words", "documents"):
        rows[name][0] = 0
        rows[name][1, 4:] = 0
    batch = prepare(SMALL, rows, vocabulary)
    chosen = chosen_of(batch)
    np.testing.assert_array_equal(chosen.sum(1)[:3], [0, 4, 11])
    np.testing.assert_array_equal(np.asarray(batch["target_weights"]).sum(1)[:3], [0, 4, 11])
    np.testing.assert_array_equal(np.asarray(batch["target_positions"])[1], [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0])
    assert float(SMALL.weights(batch)["lm"]) == 126 * 11 + 4


def naive_spans(
    objective: Permutation, lengths: np.ndarray, draws: np.ndarray, words: np.ndarray, goal: int
) -> list[tuple[int, int, int]]:
    """Spans (n, begin, end) of one block, by the loop of the published code."""
    size, reached, left, spans = len(words), 0, goal, []
    begins = [place for place in range(size) if words[place] and (place == 0 or words[place] != words[place - 1])]
    for drawn, draw in zip(lengths.tolist(), draws.tolist(), strict=True):
        if left == 0:
            break
        n = min(drawn, left)
        before = draw % (6 * n)
        begin = next((place for place in begins if place >= reached + before), None)
        if begin is None:
            break
        end = begin
        if objective.whole_words:
            seen = 0
            while end < size and words[end] and end - begin < left:
                seen += end in begins
                if seen > n:
                    break
                end += 1
        else:
            while end < size and words[end] and end - begin < n:
                end += 1
        spans.append((n, begin, end))
        left -= end - begin
        reached = end + 6 * n - before
    return spans


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("goal", [7, 43])
def test_spans_are_those_of_a_plain_loop(whole_words: bool, goal: int):
    """Blocks of 64 with a separator in the middle; what is chosen besides the spans is the top-up."""
    objective = Permutation(perm_size=64, whole_words=whole_words)
    generator = np.random.default_rng(3)
    blocks = 100
    words = np.stack([np.repeat(np.arange(1, 65), generator.integers(1, 5, 64))[:64] for _ in range(blocks)])
    words[:, 30] = 0
    words[:, 31:] += 1  # no word goes on behind it
    contexts = objective._contexts
    assert contexts == 10  # ceil(64 / 7)
    draws = row_noise(row_keys(0, 0, np.arange(blocks)), (2 * contexts + 64,))
    noise, drawn_lengths = np.asarray(draws), np.asarray(sample_lengths(draws[:, :contexts], objective.spans))
    text = words > 0
    begins = text & (words != np.pad(words, ((0, 0), (1, 0)))[:, :-1])
    chosen = np.asarray(jax.jit(jax.vmap(objective._choose, in_axes=(0, 0, 0, None)))(noise, text, begins, goal))
    assert (chosen.sum(1) == goal).all()
    topped_up = 0
    for block in range(blocks):
        places = noise[block, contexts : 2 * contexts]
        spans = naive_spans(objective, drawn_lengths[block], places, words[block], goal)
        in_spans = np.zeros(64, bool)
        for _, begin, end in spans:
            assert begins[block, begin]
            in_spans[begin:end] = True
        rest = noise[block, 2 * contexts :]
        others = [place for place in np.argsort(rest >> 1, kind="stable") if text[block, place] and not in_spans[place]]
        missing = goal - in_spans.sum()
        topped_up += missing > 0
        in_spans[others[:missing]] = True
        np.testing.assert_array_equal(chosen[block], in_spans)
    assert topped_up == blocks if goal == 43 else topped_up < blocks


def test_lengths_and_share_of_spans():
    """p proportional to 1/n; in long text of one-piece words, n of about every 7 n pieces stand in spans."""
    objective = Permutation()
    np.testing.assert_allclose(
        np.array(objective.spans) / sum(objective.spans), [0.438, 0.219, 0.146, 0.109, 0.088], atol=5e-4
    )
    noise = row_noise(row_keys(0, 0, np.arange(400)), (2 * objective._contexts,))
    lengths = np.asarray(sample_lengths(noise[:, : objective._contexts], objective.spans))
    draws = np.asarray(noise[:, objective._contexts :])
    spans = [naive_spans(objective, *drawn, np.arange(1, 257), 256) for drawn in zip(lengths, draws, strict=True)]
    middle = [n for block in spans for n, begin, end in block if end < 200]  # the end favours short ones
    first = np.bincount([block[0][0] for block in spans], minlength=6)[1:]
    for n in range(1, 6):
        assert likely(first[n - 1], 400, 1 / n / (137 / 60))
    share = sum(middle) / (400 * 200)
    assert 0.13 < share < 0.155  # 1 / 7 = 0.143


def test_fixed_targets_keep_the_choice_and_redraw_the_order(vocabulary: Vocabulary, windows: Batch):
    later = {**windows, "epoch": windows["epoch"] + 3}
    fixed = Permutation(num_predict=11, perm_size=32, fixed_targets=True)
    batches = [prepare(fixed, windows, vocabulary), prepare(fixed, later, vocabulary)]
    for name in ("targets", "target_positions"):
        np.testing.assert_array_equal(batches[0][name], batches[1][name])
    assert (np.asarray(batches[0]["ranks"]) != np.asarray(batches[1]["ranks"])).any(axis=1).all()
    fresh = [prepare(SMALL, windows, vocabulary), prepare(SMALL, later, vocabulary)]
    for name in ("target_positions", "ranks"):
        assert (np.asarray(fresh[0][name]) != np.asarray(fresh[1][name])).any(axis=1).all()
    assert len(np.unique(np.asarray(batches[0]["target_positions"]), axis=0)) == 128


def test_a_rows_targets_and_order_depend_on_the_row_alone(vocabulary: Vocabulary, windows: Batch):
    whole = prepare(SMALL, windows, vocabulary)
    places = np.random.default_rng(0).integers(0, 128, 128)
    mixed = prepare(SMALL, {name: value[places] for name, value in windows.items()}, vocabulary)
    few = {name: value[40:43] for name, value in windows.items()}
    with jax.enable_x64(True):  # without jit, and with wide numbers
        plain = SMALL.prepare(few, row_keys(0, few["epoch"], few["example"]), vocabulary)
    for name, value in whole.items():
        np.testing.assert_array_equal(mixed[name], np.asarray(value)[places])
        np.testing.assert_array_equal(plain[name], value[40:43])
        assert plain[name].dtype == value.dtype


def test_loss_reads_the_query_stream_and_renews_the_memory(vocabulary: Vocabulary, windows: Batch, table_model: Any):
    batch = prepare(SMALL, windows, vocabulary)
    variables = {"table": jax.random.normal(jax.random.key(0), (50, 50))}
    output = SMALL.loss(table_model(query=True), variables, batch, jnp.int32(3), None)
    assert output.memory == 4
    logits = -np.asarray(variables["table"], np.float64)[windows["tokens"][:, :11]]  # what the fake model's query is
    nll = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], 2)[..., 0]
    )
    np.testing.assert_allclose(output.totals["lm"], nll.sum(), rtol=1e-5)
    assert float(output.metrics["nll"][1]) == float(SMALL.weights(batch)["lm"]) == 128 * 11


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_predict": 0}, "num_predict 0"),
        ({"perm_size": 0}, "perm_size 0"),
        ({"spans": ()}, r"spans \(\)"),
        ({"context": 0}, "context 0"),
        ({"copies": 0}, "copies 0"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Permutation(**fields)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Permutation(num_predict=11, perm_size=48), "perm_size 48 does not divide the length 64 of a row"),
        (Permutation(num_predict=85, perm_size=32), "num_predict 85 exceeds the length 64 of a row"),
    ],
)
def test_rows_that_do_not_fit_are_refused(objective: Permutation, message: str, vocabulary: Vocabulary, windows: Batch):
    with pytest.raises(ValueError, match=message):
        prepare(objective, windows, vocabulary)
