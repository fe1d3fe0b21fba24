"""Every example comes once an epoch, in rows as long as they need; padding and hosts change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.data.examples import Examples, ExampleStore, Windows, lengths
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.transfer.inputs import Template

VOCABULARY = Vocabulary(size=99, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
SIZES = [3, 17, 1, 9, 5, 30, 2, 8, 11, 4, 7]


@pytest.fixture(scope="module")
def store() -> ExampleStore:
    template = Template((4,), (5,), 0)
    texts = [
        Encoding("x" * size, np.full(size, 10 + number, np.int32), np.arange(size)) for number, size in enumerate(SIZES)
    ]
    labels = np.arange(len(SIZES), dtype=np.int32) % 3
    rows = [template.row([text], 24) for text in texts]
    return ExampleStore(VOCABULARY, template, rows, labels, lambda outputs: {})


def read(reader: Examples, store: ExampleStore, n: int, seed: int | None, rows: Any = range(4)) -> Any:
    return reader.batch(store, n, rows, batch_size=4, seed=seed)


def test_the_ordered_pass_is_by_length_and_ends_in_padding(store):
    reader = Examples(length=24)
    assert reader.passes(store, 4) == 3
    batches = [read(reader, store, n, None) for n in range(3)]
    assert [batch["example"].tolist() for batch in batches] == [[2, 6, 0, 9], [4, 10, 7, 3], [8, 1, 5, -1]]
    assert [batch["tokens"].shape[1] for batch in batches] == [8, 12, 24]
    assert batches[0]["tokens"][0].tolist() == [4, 12, 5, 0, 0, 0, 0, 0]
    assert batches[2]["documents"].sum(1).tolist() == [13, 19, 24, 0]  # 30 tokens are cut to 22 and two special ones
    assert batches[0]["labels"].tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("pool", [1, 3])
def test_training_reads_each_example_once_an_epoch(store, pool):
    reader = Examples(length=24, pool=pool)
    batches = [read(reader, store, n, 5) for n in range(33)]  # 132 rows: twelve epochs of eleven
    seen = [(int(e), int(x)) for batch in batches for e, x in zip(batch["epoch"], batch["example"], strict=True)]
    assert sorted(seen) == [(epoch, example) for epoch in range(12) for example in range(11)]
    for batch in batches:
        longest = min(24, max(SIZES[x] + 2 for x in batch["example"]))
        assert batch["tokens"].shape[1] == min(n for n in lengths(24) if n >= longest)
        assert batch["labels"].tolist() == (batch["example"] % 3).tolist()
        assert batch["tokens"][:, 1].tolist() == (10 + batch["example"]).tolist()
    assert seen[:44] != [
        (e, x)
        for b in (read(reader, store, n, 6) for n in range(11))
        for e, x in zip(b["epoch"].tolist(), b["example"].tolist(), strict=True)
    ]


def test_pools_save_padding(store):
    padded = [sum(read(Examples(24, pool), store, n, 5)["tokens"].size for n in range(33)) for pool in (1, 3)]
    assert padded[1] < padded[0]


def test_a_row_does_not_depend_on_the_others_that_are_asked_for(store):
    reader = Examples(length=24, pool=2)
    whole = read(reader, store, 3, 1)
    part = read(reader, store, 3, 1, rows=[1, 3])
    for name, value in part.items():
        np.testing.assert_array_equal(value, whole[name][[1, 3]])


def test_too_few_examples(store):
    with pytest.raises(ValueError, match="11 examples are too few for a batch of 12"):
        Examples(24).batch(store, 0, [0], batch_size=12, seed=0)
    with pytest.raises(ValueError, match="pool 0: choose 1 or more"):
        Examples(24, pool=0)


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("room", [1, 2, 5, 8])
def test_windows_leave_nothing_out_and_end(stride, room):
    reader = Windows(stride=stride)
    for count in range(40):
        starts = reader.starts(count, room)
        assert starts[0] == 0 and len(starts) >= 1
        read = [place for start in starts for place in range(start, min(start + room, count))]
        assert set(read) == set(range(count))
        assert all(start < count for start in starts[1:])  # none is empty, and the one before did not reach the end
        assert all(start + room < count for start in starts[:-1])
        best = reader.best(count, room)
        assert all(starts[window] <= place < starts[window] + room for place, window in enumerate(best.tolist()))


def test_a_token_is_read_where_it_has_the_most_context():
    # windows 0-3, 2-5, 4-6: of token 3 the poorer sides are 0, 1; of 4 they are 1, 0; of 5 they are 0, 1
    assert Windows(stride=2).best(7, 4).tolist() == [0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="stride 0: choose 1 or more"):
        Windows(stride=0)
