from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data import readers
from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.data.readers import Blocks, Lanes, draw, shuffled, uniform

DOCUMENTS = [[5, 7, 3], [4], [9, 2, 2, 6, 5], [1, 1], [8, 3, 4]]


EVERY_READER = [
    Blocks(8),
    Blocks(8, stride=3),
    Blocks(7, join_documents=True),
    Lanes(8, direction="both"),
    Lanes(14, pairs=True),
    Lanes(14, pairs=True, join_documents=True, direction="both"),
    Pairs(16),
    Pairs(12, relation="order", separators=2),
    Pairs(20, unit="sentence"),
    Sentences(12),
    Sentences(12, cross_documents=False),
]


@pytest.mark.parametrize("reader", EVERY_READER, ids=str)
@pytest.mark.parametrize("seed", [None, 5])
def test_hosts_read_together_what_one_host_reads(make_store, reader, seed):
    store, again = make_store(DOCUMENTS * 2), make_store(DOCUMENTS * 2)
    for n in (7, 1, 0, 40 if seed else 2):  # in any order, on a store that has been read and on a fresh one
        whole = reader.batch(store, n, range(4), batch_size=4, seed=seed)
        for rows in ([0, 1], [2, 3], [3], [0, 2]):
            part = reader.batch(again, n, rows, batch_size=4, seed=seed)
            assert part.keys() == whole.keys()
            for name in whole:
                np.testing.assert_array_equal(part[name], whole[name][rows], err_msg=name)


@pytest.mark.parametrize("reader", EVERY_READER, ids=str)
@pytest.mark.parametrize("seed", [None, 5])
def test_every_row_has_the_contracts_fields(make_store, reader, seed):
    store = make_store(DOCUMENTS * 2)
    seen = set()
    for n in range(reader.passes(store, 4)):
        batch = reader.batch(store, n, range(4), batch_size=4, seed=seed)
        for name, value in batch.items():
            assert value.dtype == (bool if name == "reversed" else np.int32), name
            assert value.shape == ((4,) if name in ("example", "epoch", "relation", "reversed") else (4, reader.length))
        padding = batch["documents"] == 0
        assert np.all(batch["tokens"][padding] == 0)
        assert np.all(batch["positions"] == np.arange(reader.length))
        text = batch["tokens"] > 6
        assert np.all((batch["words"] > 0) == text)
        for row in range(4):
            words = batch["words"][row][text[row]]
            assert words.tolist() == sorted(words)
            assert set(words.tolist()) == set(range(1, len(set(words.tolist())) + 1))
        seen |= set(zip(batch["epoch"].tolist(), batch["example"].tolist(), strict=True))
    assert len(seen) == 4 * reader.passes(store, 4)


def test_words_are_numbered_along_the_row(make_store):
    # begin, a sentence of 5 and one of 2 (a word begins at every third token), end; begin, a sentence of 4, end
    store = make_store([[5, 2], [4]])
    batch = Blocks(12).batch(store, 0, [0], batch_size=1, seed=None)
    assert batch["tokens"][0].tolist() == [2, 10, 11, 12, 13, 14, 15, 16, 3, 2, 17, 18]
    assert batch["words"][0].tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 0, 0, 4, 4]
    assert batch["documents"][0].tolist() == [1] * 9 + [2] * 3
    assert batch["next_documents"][0].tolist() == [1] * 8 + [2] * 4
    late = Blocks(3).batch(store, 1, [0], batch_size=1, seed=None)  # begins inside a word
    assert late["tokens"][0].tolist() == [12, 13, 14]
    assert late["words"][0].tolist() == [1, 2, 2]
    reverse = Lanes(12, direction="backward").batch(store, 0, [0], batch_size=1, seed=None)
    assert reverse["tokens"][0].tolist() == [3, 20, 19, 18, 17, 2, 3, 16, 15, 14, 13, 12]
    assert reverse["words"][0].tolist() == [0, 1, 2, 2, 2, 0, 0, 3, 3, 4, 4, 5]


def test_overlapping_windows_of_an_ordered_pass(make_store):
    store = make_store([[8]])  # 10 tokens, 9 places
    batch = Blocks(4, stride=2).batch(store, 0, range(5), batch_size=5, seed=None)
    assert batch["tokens"].tolist() == [[2, 10, 11, 12], [11, 12, 13, 14], [13, 14, 15, 16], [15, 16, 17, 0], [0] * 4]
    assert batch["next_documents"].tolist() == [[1] * 4, [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0], [0] * 4]
    assert batch["documents"].tolist() == [[1] * 4] * 3 + [[1, 1, 1, 0], [0] * 4]


def test_lanes_go_on_where_they_stopped(make_store):
    store = make_store(DOCUMENTS * 3)
    reader, batch_size = Lanes(5), 4
    count = reader.passes(store, batch_size)
    text = [[] for _ in range(batch_size)]
    ids = [[] for _ in range(batch_size)]
    for n in range(2 * count):
        batch = reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=0)
        assert batch["epoch"].tolist() == [n // count] * batch_size
        for row in range(batch_size):
            real = batch["documents"][row] > 0
            text[row] += batch["tokens"][row][real].tolist()
            ids[row] += batch["documents"][row][real].tolist()
    half = [row[: len(row) // 2] for row in text]
    assert np.concatenate(half).tolist() == store.tokens[:-1].tolist()  # the lanes of an epoch, one after the other
    assert [row[len(row) // 2 :] for row in text] == half
    for row in ids:
        assert row == sorted(row)  # a document of a later epoch never has an earlier one's id
        assert row[len(row) // 2] - row[0] == len(store.offsets) - 1
    assert all(set(row[: len(row) // 2]).isdisjoint(row[len(row) // 2 :]) for row in ids)


@pytest.mark.parametrize("reader", [Lanes(5, join_documents=True), Lanes(16, join_documents=True, pairs=True)], ids=str)
def test_joined_documents_are_one_in_each_epoch(make_store, reader):
    """So that a lane's start does not see its end in the memory."""
    store, batch_size = make_store(DOCUMENTS * 3), 4
    count = reader.passes(store, batch_size)
    for n in range(3 * count):
        documents = reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=0)["documents"]
        assert set(documents[documents > 0].tolist()) == {1 + n // count * (len(store.offsets) - 1)}


def test_document_ids_stay_int32(make_store):
    store = make_store(DOCUMENTS)
    batch = Lanes(8).batch(store, 2**40, range(2), batch_size=2, seed=0)
    real = batch["documents"][batch["documents"] != 0]
    assert real.min() > 0


# [CLS] = 4, [SEP] = 5. One document: 2, sentences 10..12, 13..16, 17..21, 22..27, ..., 3.
PAIRED = [[3, 4, 5, 6, 7, 8]]


def fixed_chance(monkeypatch, cut, place, relation):
    """Fixes XLNet's three draws: which sentence start cuts A off, where a false B is, whether it is false."""
    monkeypatch.setattr(readers, "uniform", lambda *_: np.array([[cut], [place], [relation]]))


def test_xlnet_window_with_a_true_second_segment(make_store, monkeypatch):
    store = make_store(PAIRED)  # tokens: 2, 10, ..., 42, 3
    fixed_chance(monkeypatch, cut=0.6, place=0.0, relation=0.5)
    reader = Lanes(16, stride=4, pairs=True, join_documents=True)
    batch = reader.batch(store, 1, [0], batch_size=1, seed=0)
    # Places 4 to 7 are reused; of the nine after them, sentences start at 17 and 22: the draw takes the second.
    assert batch["tokens"][0].tolist() == [13, 14, 15, 16, 17, 18, 19, 20, 21, 5, 22, 23, 24, 25, 5, 4]
    assert batch["segments"][0].tolist() == [0] * 10 + [1] * 5 + [2]
    assert batch["relation"].tolist() == [0]
    assert batch["documents"][0].tolist() == [1] * 16
    assert batch["words"][0].tolist() == [1, 1, 1, 2, 3, 3, 3, 4, 4, 0, 5, 5, 5, 6, 0, 0]
    assert "next_tokens" not in batch
    following = reader.batch(store, 2, [0], batch_size=1, seed=0)
    assert following["tokens"][0, :4].tolist() == [17, 18, 19, 20]  # starts `stride` later


def test_xlnet_window_with_a_false_second_segment(make_store, monkeypatch):
    store = make_store([[3, 4, 5, 6, 7, 8, 9]])  # 44 tokens: 2, 10 to 51, 3
    fixed_chance(monkeypatch, cut=0.0, place=0.5, relation=0.49)
    reader = Lanes(16, stride=4, pairs=True, join_documents=True)
    batch = reader.batch(store, 0, [0], batch_size=1, seed=0)
    # Reused: places 0 to 3. A: 13 to 16, cut at the first sentence start, 17. B: five tokens from a place in [25, 34],
    # here 30 (token 39), moved back to the start of its sentence, token 35.
    assert batch["tokens"][0].tolist() == [2, 10, 11, 12, 13, 14, 15, 16, 5, 35, 36, 37, 38, 39, 5, 4]
    assert batch["segments"][0].tolist() == [0] * 9 + [1] * 6 + [2]
    assert batch["relation"].tolist() == [1]


def test_xlnet_window_read_backwards(make_store, monkeypatch):
    store = make_store(PAIRED)
    fixed_chance(monkeypatch, cut=0.0, place=0.0, relation=0.9)
    reader = Lanes(16, stride=4, pairs=True, join_documents=True, direction="both")
    batch = reader.batch(store, 0, [0, 1], batch_size=2, seed=0)
    assert batch["reversed"].tolist() == [False, True]
    # From the end: 3, 42, 41, 40 are reused; then 39 to 35, the rest of the last sentence, and the one before it.
    assert batch["tokens"][1].tolist() == [3, 42, 41, 40, 39, 38, 37, 36, 35, 5, 34, 33, 32, 31, 5, 4]


def test_xlnet_pairs_respect_documents(make_store, monkeypatch):
    store = make_store([[6], [2, 3], [4, 4, 4, 4, 4]])
    tokens = store.tokens.tolist()
    assert tokens[:16] == [2, *range(10, 16), 3, 2, *range(16, 21), 3, 2]
    reader = Lanes(16, stride=4, pairs=True)
    fixed_chance(monkeypatch, cut=0.0, place=0.0, relation=0.9)
    # A begins at place 4 (token 13) in the first document, which has no other sentence: A ends with it at the latest.
    batch = reader.batch(store, 0, [0], batch_size=1, seed=0)
    assert batch["tokens"][0, :9].tolist() == [2, 10, 11, 12, 13, 14, 15, 3, 5]
    assert batch["relation"].tolist() == [1]
    assert set(batch["documents"][0].tolist()) <= {0, 1}
    # A begins at place 8 with the second document; B is its second sentence, and what comes after it is padding.
    batch = reader.batch(store, 1, [0], batch_size=1, seed=0)
    assert batch["tokens"][0].tolist() == [13, 14, 15, 3, 2, 16, 17, 5, 18, 19, 20, 3, 0, 0, 5, 4]
    assert batch["documents"][0].tolist() == [1] * 4 + [2] * 8 + [0, 0, 2, 2]
    assert batch["relation"].tolist() == [0]
    assert batch["segments"][0].tolist() == [0] * 8 + [1] * 7 + [2]


def test_xlnet_pairs_over_many_windows(make_store):
    """A always continues the lane; a true B continues A; a false one is sentences from elsewhere; half are false."""
    store = make_store([[3, 5, 4, 6, 2, 7] * 40] * 2)
    place = {token: i for i, token in enumerate(store.tokens.tolist()) if token > 6}
    reader, batch_size = Lanes(32, pairs=True, join_documents=True), 4
    false = []
    for n in range(reader.passes(store, batch_size)):
        batch = reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=3)
        for row in range(batch_size):
            tokens, segments = batch["tokens"][row], batch["segments"][row]
            start = row * len(store.tokens) // batch_size + n * 16
            a = tokens[segments == 0][:-1].tolist()
            assert a == [store.tokens[(start + i) % len(store.tokens)] for i in range(len(a))]
            b = tokens[segments == 1][:-1].tolist()
            assert len(a) + len(b) == 16 + 13
            text = [token for token in b if token > 6]
            if batch["relation"][row] == 0:
                assert b == [store.tokens[(start + len(a) + i) % len(store.tokens)] for i in range(len(b))]
            else:
                distance = [(place[token] - start) % len(store.tokens) for token in text]
                assert min(distance) >= 32 - 3
            if b[0] > 6:
                assert store.flags[place[b[0]]] & 2
            false.append(batch["relation"][row].item())
    assert abs(np.mean(false) - 0.5) < 4 * 0.5 / len(false) ** 0.5


@pytest.mark.parametrize(
    ("reader", "batch_size", "message"),
    [
        (Blocks(8), 30, r"the text has 32 tokens, too few for 30 rows of length 8, which need 241: give more text"),
        (Lanes(8), 4, r"too few for 4 rows of length 8, which need 33"),
        (Lanes(20, pairs=True), 1, r"too few for 1 rows of length 20, which need 40"),
        (Lanes(16, stride=4, pairs=True), 1, r"too few for 1 rows of length 16, which need 35"),
        (Pairs(16), 60, r"the text makes \d+ pairs of length 16, too few for a batch of 60"),
        (Sentences(16), 60, r"the text makes \d+ rows of length 16, too few for a batch of 60"),
    ],
    ids=str,
)
def test_too_little_text(make_store, reader, batch_size, message):
    store = make_store([[5, 7, 3], [4, 9]])
    with pytest.raises(ValueError, match=message):
        reader.batch(store, 0, range(batch_size), batch_size=batch_size, seed=0)


@pytest.mark.parametrize("reader", [Blocks(8), Lanes(8), Pairs(16), Sentences(16)], ids=str)
def test_no_text(make_store, reader):
    with pytest.raises(ValueError, match="its split of the corpus is empty"):
        reader.passes(make_store([]), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks(1), "length 1 of a row is too short"),
        (lambda: Blocks(8, stride=9), "stride 9 is not between 1 and length 8"),
        (lambda: Lanes(8, stride=0), "stride 0 is not between"),
        (lambda: Lanes(8, stride=5, pairs=True), "stride 5 leaves 3 of length 8"),
        (lambda: Pairs(4), "length 4 is too short for two segments: choose 5"),
        (lambda: Pairs(16, short_probability=2), "short_probability 2 is not"),
        (lambda: Pairs(16, copies=0), "copies 0 must be 1 or more"),
        (lambda: Sentences(2), "length 2 is too short"),
    ],
)
def test_bad_configs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_odd_batch_has_no_halves(make_store):
    with pytest.raises(ValueError, match="batch_size 3 has no halves"):
        Lanes(8, direction="both").passes(make_store(DOCUMENTS), 3)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_shuffled_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, np.full(size, epoch))
    assert sorted(order.tolist()) == list(range(size))


def test_shuffled_seeks_in_a_large_range():
    size = 10**12 + 39
    index = np.array([0, 1, size - 1])
    order = shuffled(index, size, 0, np.zeros(3, np.int64))
    assert len(set(order.tolist())) == 3
    assert order.min() >= 0
    assert order.max() < size
    assert order.tolist() == [shuffled(index[i : i + 1], size, 0, np.zeros(1, np.int64)).item() for i in range(3)]


def test_shuffled_looks_random():
    """Over epochs, every place of a small range is equally likely for every index and pair of indices (chi-square)."""
    size, seeds = 7, 42_000
    index, epoch = np.tile(np.arange(size), seeds), np.repeat(np.arange(seeds), size)
    orders = shuffled(index, size, 0, epoch).reshape(seeds, size)
    counts = np.stack([np.bincount(orders[:, i], minlength=size) for i in range(size)])
    expected = seeds / size
    assert (np.square(counts - expected) / expected).sum() < 75  # 36 degrees of freedom: 99.99 %
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size * size).reshape(size, size)
    off = pairs[~np.eye(size, dtype=bool)]
    assert (np.square(off - seeds / 42) / (seeds / 42)).sum() < 82  # 41 degrees of freedom


def test_draws_are_uniform_and_fresh():
    values = uniform(0, np.arange(1000)[:, None], np.arange(10))
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 4 * (1 / 12 / values.size) ** 0.5
    assert len(np.unique(draw(0, np.arange(1000)[:, None], np.arange(10)))) == values.size
    assert draw(1, 2) != draw(2, 1)
