"""What holds for every reader, of any text: who is a target, who is attended, and that a batch is a pure function."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.data.readers import Blocks, Lanes

DOCUMENTS = [[5, 7, 3], [4], [9, 2, 2, 6, 5], [1, 1], [8, 3, 4]]


def targets(batch):
    """The (token, next token) of every place that predicts."""
    predicts = (batch["next_documents"] == batch["documents"]) & (batch["documents"] > 0)
    return list(zip(batch["tokens"][predicts].tolist(), batch["next_tokens"][predicts].tolist(), strict=True))


def one_pass(reader, store, batch_size, seed=None, first=0):
    for n in range(first, first + reader.passes(store, batch_size)):
        yield reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=seed)


def expected_targets(store, join_documents, backward=False):
    """Each token but the first with the token before it, less those that open a document."""
    tokens = store.tokens[::-1].tolist() if backward else store.tokens.tolist()
    numbers = np.repeat(np.arange(len(store.offsets) - 1), np.diff(store.offsets))
    numbers = numbers[::-1] if backward else numbers
    return [
        (tokens[i], tokens[i + 1]) for i in range(len(tokens) - 1) if join_documents or numbers[i] == numbers[i + 1]
    ]


READERS = [
    Blocks(8),
    Blocks(8, stride=3),
    Blocks(7, join_documents=True),
    Blocks(500),
    Lanes(8),
    Lanes(8, stride=5, join_documents=True),
    Lanes(6, direction="backward"),
    Lanes(500),
]


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("one_boundary", [False, True])
def test_an_ordered_pass_scores_every_token_once(make_store, reader, batch_size, one_boundary):
    store = make_store(DOCUMENTS, one_boundary)
    backward = getattr(reader, "direction", "") == "backward"
    found = [pair for batch in one_pass(reader, store, batch_size) for pair in targets(batch)]
    assert collections.Counter(found) == collections.Counter(expected_targets(store, reader.join_documents, backward))


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    length=st.integers(2, 12),
    stride=st.integers(1, 12),
    batch_size=st.integers(1, 4),
    lanes=st.booleans(),
    join_documents=st.booleans(),
)
def test_any_pass_scores_every_token_once(make_store, documents, length, stride, batch_size, lanes, join_documents):
    store = make_store(documents)
    stride = min(stride, length)
    reader = (Lanes if lanes else Blocks)(length=length, stride=stride, join_documents=join_documents)
    found = [pair for batch in one_pass(reader, store, batch_size) for pair in targets(batch)]
    assert collections.Counter(found) == collections.Counter(expected_targets(store, join_documents))


def test_lanes_in_both_directions_score_every_token_once_in_each(make_store):
    store = make_store(DOCUMENTS)
    forward, backward = [], []
    for batch in one_pass(Lanes(8, direction="both"), store, 4):
        assert batch["reversed"].tolist() == [False, False, True, True]
        for half, found in ((slice(0, 2), forward), (slice(2, 4), backward)):
            found += targets({name: value[half] for name, value in batch.items()})
    assert collections.Counter(forward) == collections.Counter(expected_targets(store, False))
    assert collections.Counter(backward) == collections.Counter(expected_targets(store, False, backward=True))


@pytest.mark.parametrize("stride", [None, 3])
def test_a_training_epoch_of_blocks_scores_every_token_once(make_store, stride):
    store = make_store(DOCUMENTS)
    reader = Blocks(8, stride=stride)
    epochs = collections.defaultdict(list)
    examples = collections.defaultdict(list)
    for n in range(40):
        batch = reader.batch(store, n, range(3), batch_size=3, seed=7)
        for row in range(3):
            epoch = batch["epoch"][row].item()
            epochs[epoch] += targets({name: value[row : row + 1] for name, value in batch.items()})
            examples[epoch].append(batch["example"][row].item())
    whole = sorted(epochs)[:-1]
    assert len(whole) >= 2
    for epoch in whole:
        assert collections.Counter(epochs[epoch]) == collections.Counter(expected_targets(store, False))
    assert sorted(examples[0]) == sorted(examples[1]) == list(range(len(examples[0])))
    assert examples[0] != examples[1]
    other = [reader.batch(store, n, range(3), batch_size=3, seed=8)["example"].tolist() for n in range(3)]
    assert np.concatenate(other).tolist() != examples[0][:9]


@st.composite
def any_reader(draw, pairs=True):
    """A reader of short rows, documents enough for it, a batch size that four hosts share, and a seed."""
    length = draw(st.integers(14, 24))
    stride = draw(st.none() | st.integers(1, length))
    joined, seed = draw(st.booleans()), draw(st.none() | st.integers(0, 2**32))
    kinds = [
        Blocks(length, joined, stride),
        Lanes(length, stride, joined, direction=draw(st.sampled_from(["forward", "backward", "both"]))),
        Sentences(length, cross_documents=joined),
    ]
    if pairs:
        direction = draw(st.sampled_from(["forward", "backward", "both"]))
        kinds += [
            Lanes(length, draw(st.none() | st.integers(1, length - 5)), joined, pairs=True, direction=direction),
            Pairs(
                length,
                unit=draw(st.sampled_from(["segment", "sentence"])),
                relation=draw(st.sampled_from(["next", "order"])),
                copies=draw(st.integers(1, 3)),
                separators=draw(st.integers(1, 2)),
            ),
        ]
    sentences = st.lists(st.integers(1, 9), min_size=2, max_size=5)
    documents = draw(st.lists(sentences, min_size=2, max_size=6))
    batch_size = draw(st.sampled_from([4, 8]))
    enough = -(-batch_size * 40 // sum(map(sum, documents)))
    return draw(st.sampled_from(kinds)), documents * enough, batch_size, seed


@settings(max_examples=150, deadline=None)
@given(any_reader(), st.data())
def test_a_seek_is_reading_up_to_there_on_any_number_of_hosts(make_store, case, data):
    reader, documents, batch_size, seed = case
    store = make_store(documents)
    count = reader.passes(store, batch_size)
    last = min(count if seed is None else 2 * count + 1, 12)
    read = [reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=seed) for n in range(last)]
    n, hosts = data.draw(st.integers(0, last - 1)), data.draw(st.sampled_from([1, 2, 4]))
    again, share = make_store(documents), batch_size // hosts
    parts = [
        reader.batch(again, n, range(host * share, (host + 1) * share), batch_size=batch_size, seed=seed)
        for host in range(hosts)
    ]
    for name, value in read[n].items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value, err_msg=name)


@settings(max_examples=150, deadline=None)
@given(any_reader())
def test_no_document_is_attended_across_unless_joined(make_store, case):
    """Neither within a row nor, in lanes, from the memory: there an id is one document's, of one epoch, for good."""
    reader, documents, batch_size, seed = case
    store = make_store(documents)
    document = dict(
        zip(store.tokens.tolist(), np.repeat(np.arange(len(documents)), np.diff(store.offsets)), strict=True)
    )
    joined = getattr(reader, "join_documents", getattr(reader, "cross_documents", False))
    lanes, count = isinstance(reader, Lanes), reader.passes(store, batch_size)
    owners = collections.defaultdict(set)
    for n in range(min(count if seed is None else 2 * count, 12)):
        batch = reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=seed)
        segments = batch.get("segments", np.zeros_like(batch["tokens"]))
        for row, place in zip(*np.nonzero(batch["tokens"] > 6), strict=True):
            assert batch["documents"][row, place] > 0
            # The second segment is there to be compared with the first, wherever it is from.
            key = (row, None if lanes else n, batch["documents"][row, place], n if segments[row, place] else None)
            owners[key].add((document[batch["tokens"][row, place].item()], batch["epoch"][row].item()))
    if not joined:
        windows_round_the_end = lanes and reader.pairs  # what follows the stream's end is the next epoch's
        for found in owners.values():
            assert len({number for number, _ in found} if windows_round_the_end else found) == 1
    elif not isinstance(reader, Sentences) and not getattr(reader, "pairs", False):
        assert {len({epoch for _, epoch in found}) for found in owners.values()} == {1}


@settings(max_examples=100, deadline=None)
@given(any_reader(pairs=False))
def test_an_epoch_of_training_has_every_token_once(make_store, case):
    """As a target in streams, as a token in rows of sentences; also where its rows begin and end within batches."""
    reader, documents, batch_size, _ = case
    store = make_store(documents)
    epochs = collections.defaultdict(collections.Counter)
    for n in range(2 * reader.passes(store, batch_size) + 1):
        batch = reader.batch(store, n, range(batch_size), batch_size=batch_size, seed=1)
        for row in range(batch_size):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            found = one["tokens"][one["tokens"] > 6].tolist() if isinstance(reader, Sentences) else targets(one)
            epochs[batch["epoch"][row].item(), bool(batch.get("reversed", [False] * batch_size)[row])].update(found)
    assert {epoch for epoch, _ in epochs} >= {0, 1}
    for backward in {backward for _, backward in epochs}:
        if isinstance(reader, Sentences):
            expected = store.tokens[store.tokens > 6].tolist()
        else:
            expected = expected_targets(store, reader.join_documents, backward)
        assert epochs[0, backward] == epochs[1, backward] == collections.Counter(expected)
