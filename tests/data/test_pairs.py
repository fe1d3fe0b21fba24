from __future__ import annotations

import collections
import functools
import inspect
import itertools
import random
import threading
import time

import numpy as np
import pytest

from ctx_jax.data import pairs
from ctx_jax.data.pairs import Pairs, Sentences, front, pair_plan, sentence_plan, sentence_table, truncated

SHORT = [[3, 5, 4, 6, 2, 7] * 40] * 6
"""Six documents of 240 sentences."""


def document_of(store, place):
    return np.searchsorted(store.offsets, place, side="right") - 1


def test_layout(make_store):
    # Documents of one sentence each: A is that sentence, B the only other document's.
    store = make_store([[4], [3]])
    batch = Pairs(12).batch(store, 0, range(3), batch_size=3, seed=None)
    assert batch["tokens"].tolist() == [
        [4, 10, 11, 12, 13, 5, 14, 15, 16, 5, 0, 0],
        [4, 14, 15, 16, 5, 10, 11, 12, 13, 5, 0, 0],
        [0] * 12,
    ]
    assert batch["segments"].tolist() == [[0] * 6 + [1] * 4 + [0] * 2, [0] * 5 + [1] * 5 + [0] * 2, [0] * 12]
    assert batch["documents"].tolist() == [[1] * 10 + [0] * 2] * 2 + [[0] * 12]
    assert batch["words"].tolist() == [
        [0, 1, 1, 1, 2, 0, 3, 3, 3, 0, 0, 0],
        [0, 1, 1, 1, 0, 2, 2, 2, 3, 0, 0, 0],
        [0] * 12,
    ]
    assert batch["relation"].tolist() == [1, 1, 0]
    assert batch["example"].tolist() == [0, 1, 2]
    roberta = Pairs(12, separators=2).batch(store, 0, [0], batch_size=3, seed=None)
    assert roberta["tokens"].tolist() == [[4, 10, 11, 12, 13, 5, 5, 14, 15, 16, 5, 0]]


@pytest.mark.parametrize("unit", ["segment", "sentence"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_false_second_segment_is_from_another_document(make_store, unit, seed):
    store = make_store([[3, 5], [2], [4, 4, 4, 4, 9], [1, 1, 1, 1, 1, 1, 30], [6]] * 5)
    sentences = sentence_table(store)
    for copy in range(3):
        plan = pair_plan(store, Pairs(24, unit=unit), seed, copy)
        a, b = document_of(store, plan["a"]), document_of(store, plan["b"])
        assert np.all((a != b) == (plan["relation"] == 1))
        assert plan["relation"].min() == 0
        assert plan["relation"].max() == 1
        for name in "ab":  # never a boundary token, never past its document, never empty, never too long
            last = plan[name] + plan[f"{name}_length"] - 1
            assert np.all(document_of(store, last) == document_of(store, plan[name]))
            assert np.all(store.tokens[plan[name]] > 3)
            assert np.all(store.tokens[last] > 3)
            assert plan[f"{name}_length"].min() >= 1
        assert np.all(plan["a_length"] + plan["b_length"] <= 21)
        assert np.all(plan["a"][plan["relation"] == 0] < plan["b"][plan["relation"] == 0])
        assert set(document_of(store, sentences.start)) == set(a)


def test_next_sentence_ratio(make_store):
    """Half of the pairs whose sentences have a choice are false; the last sentence of a document, alone, always is."""
    store = make_store(SHORT)
    for reader in (Pairs(40, short_probability=0), Pairs(40, unit="sentence"), Pairs(40, relation="order")):
        plans = [pair_plan(store, reader, 0, copy) for copy in range(10)]
        last = sentence_table(store).start[np.cumsum([len(document) for document in SHORT]) - 1]
        free = np.concatenate([plan["relation"][~np.isin(plan["a"], last)] for plan in plans])
        assert len(free) > 1500
        assert abs(free.mean() - 0.5) < 4 * 0.5 / len(free) ** 0.5


def test_sentences_follow_each_other_and_replaced_ones_come_back(make_store, monkeypatch):
    """Without truncation the next pair starts where A ends if B is false, and where B ends if it is true."""
    monkeypatch.setattr(pairs, "truncated", lambda a, b, room: (a, b))
    store = make_store(SHORT)
    starts = set(sentence_table(store).start.tolist())
    for reader in (Pairs(40), Pairs(40, unit="sentence")):
        plan = inspect.unwrap(pair_plan)(store, reader, 3, 0)
        for number in range(6):
            mine = plan[document_of(store, plan["a"]) == number]
            a_end, b_end = mine["a"] + mine["a_length"], mine["b"] + mine["b_length"]
            true = mine["relation"] == 0
            assert np.all(mine["b"][true] == a_end[true])
            assert mine["a"][0] == store.offsets[number] + 1
            expected = np.where(true, b_end, a_end)
            assert mine["a"][1:].tolist() == expected[:-1].tolist()
            assert expected[-1] == store.offsets[number + 1] - 1
            assert set(mine["a"].tolist()) | set(mine["b"].tolist()) <= starts
            if reader.unit == "sentence":
                assert np.all(a_end - mine["a"] <= 7)
                assert np.all(mine["b_length"] <= 7)


def test_chunks_reach_the_target_and_no_further(make_store, monkeypatch):
    monkeypatch.setattr(pairs, "truncated", lambda a, b, room: (a, b))
    store = make_store(SHORT)
    plan = inspect.unwrap(pair_plan)(store, Pairs(40, short_probability=0), 3, 0)
    total = plan["a_length"] + plan["b_length"]
    assert total.max() < 37 + 7
    small = (total < 37) & (plan["relation"] == 0)  # at most at the end of each document
    assert len(set(document_of(store, plan["a"][small]).tolist())) == small.sum() <= 6


def test_short_targets_are_drawn_per_document_and_copy(make_store):
    store = make_store([[5] * 12] * 400)
    reader = Pairs(33, short_probability=0.25)  # room for 30 tokens: six sentences
    plan = pair_plan(store, reader, 0, 0)
    total = plan["a_length"] + plan["b_length"]
    first = np.unique(document_of(store, plan["a"]), return_index=True)[
        1
    ]  # each document's first pair is full unless short
    short = total[first] < 30
    # A target of 26 to 30 still takes six sentences: 5 of 29 draws. A false B may fall short at its document's end.
    true = plan["relation"][first] == 0
    expected = 0.25 * 24 / 29
    assert abs(short[true].mean() - expected) < 4 * (expected * (1 - expected) / true.sum()) ** 0.5
    assert not np.array_equal(plan, pair_plan(store, reader, 0, 1))
    assert not np.array_equal(plan, pair_plan(store, reader, 1, 0))
    assert np.array_equal(plan, inspect.unwrap(pair_plan)(store, reader, 0, 0))


def test_order_swaps_neighbours(make_store):
    store = make_store([[3, 5, 4, 6], [2], [4, 4, 4, 4, 9, 9]] * 20)
    plan = pair_plan(store, Pairs(20, relation="order"), 0, 0)
    assert np.all(document_of(store, plan["a"]) == document_of(store, plan["b"]))
    assert np.all((plan["a"] > plan["b"]) == (plan["relation"] == 1))
    assert not set((document_of(store, plan["a"]) % 3).tolist()) & {1}  # a single sentence has no neighbour
    assert pair_plan(make_store([[3, 4]]), Pairs(20, relation="order"), 0, 0)["a"].size == 1


def test_one_document_cannot_give_a_false_second_segment(make_store):
    with pytest.raises(ValueError, match="a false second segment comes from another document and the store has one"):
        Pairs(16).passes(make_store([[3, 4, 5]]), 1)


def test_truncation_equals_taking_off_one_by_one():
    for room in (4, 5, 9):
        for a in range(1, 15):
            for b in range(1, 15):
                x, y = a, b
                while x + y > room:
                    x, y = (x - 1, y) if x > y else (x, y - 1)
                assert truncated(np.array([a]), np.array([b]), room) == (x, y)


def test_truncation_is_at_the_front_or_the_back():
    counts = front(random.Random(0), np.full(10_000, 6))
    assert counts.min() == 0
    assert counts.max() == 6
    assert abs(counts.mean() - 3) < 4 * (6 * 0.25 / 10_000) ** 0.5
    assert abs(counts.var() - 1.5) < 0.1
    assert front(random.Random(0), np.array([0])).tolist() == [0]


def test_copies_take_turns_and_every_pair_comes_once_an_epoch(make_store):
    store = make_store([[3, 5, 4, 6, 2, 7]] * 6)
    reader = Pairs(24, copies=2)
    sizes = [len(pair_plan(store, reader, 1, copy)) for copy in range(2)]
    seen, content = collections.defaultdict(list), collections.defaultdict(set)
    for n in range(sum(sizes)):  # four rows each: four epochs
        batch = reader.batch(store, n, range(4), batch_size=4, seed=1)
        for row in range(4):
            epoch = batch["epoch"][row].item()
            seen[epoch].append(batch["example"][row].item())
            content[epoch].add((batch["example"][row].item(), *batch["tokens"][row].tolist()))
    assert [sorted(seen[epoch]) for epoch in range(4)] == [list(range(sizes[epoch % 2])) for epoch in range(4)]
    assert content[0] == content[2] != content[1] == content[3]
    assert seen[0] != seen[2]  # the same pairs in another order


def test_full_sentences(make_store):
    # Sentences 10-12, 13-14 | 15-18 | 19-20, 21-26; a row has room for 8 tokens.
    store = make_store([[3, 2], [4], [2, 6]])
    batch = Sentences(10).batch(store, 0, range(3), batch_size=3, seed=None)
    assert batch["tokens"].tolist() == [
        [4, 10, 11, 12, 13, 14, 5, 0, 0, 0],
        [4, 15, 16, 17, 18, 5, 19, 20, 5, 0],
        [4, 21, 22, 23, 24, 25, 26, 5, 0, 0],
    ]
    assert batch["documents"].tolist() == [[1] * 7 + [0] * 3, [1] * 9 + [0], [1] * 8 + [0] * 2]
    assert batch["words"].tolist() == [
        [0, 1, 1, 1, 2, 2, 0, 0, 0, 0],
        [0, 1, 1, 1, 2, 0, 3, 3, 0, 0],
        [0, 1, 1, 1, 2, 2, 2, 0, 0, 0],
    ]
    one = Sentences(10).batch(
        make_store([[3, 2], [4], [2, 6]], one_boundary=True), 0, range(3), batch_size=3, seed=None
    )
    assert np.array_equal(one["tokens"], batch["tokens"])


def test_document_sentences(make_store):
    store = make_store([[3, 2], [4], [2, 6]])
    batch = Sentences(10, cross_documents=False).batch(store, 0, range(4), batch_size=4, seed=None)
    assert batch["tokens"].tolist() == [
        [4, 10, 11, 12, 13, 14, 5, 0, 0, 0],
        [4, 15, 16, 17, 18, 5, 0, 0, 0, 0],
        [4, 19, 20, 21, 22, 23, 24, 25, 26, 5],
        [0] * 10,
    ]


@pytest.mark.parametrize("cross_documents", [False, True])
@pytest.mark.parametrize("one_boundary", [False, True])
def test_every_token_of_text_comes_once_in_full_rows(make_store, cross_documents, one_boundary):
    documents = [[5, 30, 2], [1], [7] * 9, [], [2, 2], [40]]
    store = make_store(documents, one_boundary)
    reader = Sentences(14, cross_documents=cross_documents)
    found = []
    for n in range(reader.passes(store, 4)):
        tokens = reader.batch(store, n, range(4), batch_size=4, seed=None)["tokens"]
        found += tokens[tokens > 6].tolist()
    assert found == [token for token in store.tokens.tolist() if token > 6]
    plan = sentence_plan(store, reader)
    if not cross_documents:
        assert np.all(document_of(store, plan[:, 0]) == document_of(store, plan[:, 1] - 1))
    # No row could have taken the next one's first sentence too.
    table = sentence_table(store)
    for (start, end), (following, _) in itertools.pairwise(plan):
        if document_of(store, start) == document_of(store, following):
            first = table.end[np.searchsorted(table.start, following, side="right") - 1] - following
            assert end - start + min(first, 12) > 12


def test_a_plan_is_made_once_for_all_threads():
    made, results = [], []

    @pairs.once
    @functools.lru_cache
    def slow(number: int) -> object:
        made.append(number)
        time.sleep(0.05)
        return object()

    threads = [threading.Thread(target=lambda: results.append(slow(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [3]
    assert len(results) == 4
    assert len(set(results)) == 1
