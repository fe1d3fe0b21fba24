"""Each model's own rows, by hand; batches lose no row and no row depends on another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctx_jax.contract import Vocabulary
from ctx_jax.data.examples import lengths
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.transfer.inputs import Row, cut, grouped, row_length, template

VOCABULARY = Vocabulary(size=40, pad=9, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
SIZE: dict[str, Any] = {"vocabulary_size": 40, "width": 16, "layers": 2, "heads": 2, "feed_forward": 32}
BERT, GPT = BertConfig(**SIZE, max_length=24), GptConfig(**SIZE, max_length=24)
ROBERTA = BertConfig(**SIZE, max_length=24, position_offset=2, segments=0)
XL, XLNET = TransformerXLConfig(**SIZE), XLNetConfig(**SIZE)
TEXT = Encoding(" un do it", np.array([10, 11, 12, 13, 14], np.int32), np.array([0, 1, 2, 4, 7]))
"""A space of its own, "u" "n", "do" and "it"."""
SECOND = Encoding("be so", np.array([20, 21], np.int32), np.array([0, 3]))

ROWS = [
    (BERT, [4, 10, 11, 12, 13, 14, 5], [0, 0, 1, 1, 2, 3, 0], [0, 0, 0, 0, 0, 0, 0]),
    (GPT, [2, 10, 11, 12, 13, 14], [0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0]),
    (XL, [2, 10, 11, 12, 13, 14], [0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0]),
    (XLNET, [10, 11, 12, 13, 14, 5, 4], [0, 1, 1, 2, 3, 0, 0], [0, 0, 0, 0, 0, 0, 2]),
]


def lists(row: Row) -> list[Any]:
    return [value.tolist() for value in (row.tokens, row.words, row.segments)]


@pytest.mark.parametrize(("config", "tokens", "words", "segments"), ROWS)
def test_rows_are_the_models_own(config, tokens, words, segments):
    shape = template(config, VOCABULARY)
    row = shape.row([TEXT], 10)
    assert lists(row) == [tokens, words, segments]
    assert not row.cut
    assert lists(shape.row([TEXT], len(tokens))) == lists(row)


PAIRS = [
    (BERT, [4, 10, 11, 12, 13, 14, 5, 20, 21, 5], [0, 0, 1, 1, 2, 3, 0, 4, 5, 0], [0] * 7 + [1] * 3),
    (ROBERTA, [4, 10, 11, 12, 13, 14, 5, 5, 20, 21, 5], [0, 0, 1, 1, 2, 3, 0, 0, 4, 5, 0], [0] * 8 + [1] * 3),
    (GPT, [2, 10, 11, 12, 13, 14, 5, 20, 21, 4], [0, 0, 1, 1, 2, 3, 0, 4, 5, 0], [0] * 7 + [1] * 3),
    (XLNET, [10, 11, 12, 13, 14, 5, 20, 21, 5, 4], [0, 1, 1, 2, 3, 0, 4, 5, 0, 0], [0] * 6 + [1] * 3 + [2]),
]


@pytest.mark.parametrize(("config", "tokens", "words", "segments"), PAIRS)
def test_pairs_are_the_models_own(config, tokens, words, segments):
    shape = template(config, VOCABULARY, head=True)
    row = shape.row([TEXT, SECOND], 20)
    assert lists(row) == [tokens, words, segments]
    assert not row.cut
    assert lists(shape.row([TEXT, SECOND], len(tokens))) == lists(row)
    shorter = shape.row([TEXT, SECOND], len(tokens) - 2)
    assert shorter.cut
    assert shorter.tokens.tolist() == [token for token in tokens if token not in (13, 14)]


def test_a_head_of_gpt_reads_the_extract_token():
    row = template(GPT, VOCABULARY, head=True).row([TEXT], 4)
    assert (row.tokens.tolist(), row.words.tolist()) == ([2, 10, 11, 4], [0, 0, 1, 0])
    assert template(BERT, VOCABULARY, head=True) == template(BERT, VOCABULARY)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_pairs_are_cut_longest_first(first: int, second: int, room: int):
    a, b = first, second
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert cut([first, second], room) == [a, b]
    assert cut([first], room) == [min(first, room)]


@pytest.mark.parametrize(
    ("config", "tokens", "words"),
    [
        (BERT, [4, 10, 11, 5], [0, 0, 1, 0]),
        (GPT, [2, 10, 11, 12], [0, 0, 1, 1]),
        (XLNET, [10, 11, 5, 4], [0, 1, 0, 0]),
    ],
)
def test_what_is_too_long_loses_its_end_and_no_special_token(config, tokens, words):
    row = template(config, VOCABULARY).row([TEXT], 4)
    assert (row.tokens.tolist(), row.words.tolist(), row.cut) == (tokens, words, True)


@pytest.mark.parametrize(("config", "tokens"), [(BERT, [4, 5]), (GPT, [2]), (XL, [2]), (XLNET, [5, 4])])
def test_an_empty_text_is_its_special_tokens(config, tokens):
    row = template(config, VOCABULARY).row([Encoding("", np.zeros(0, np.int32), np.zeros(0, np.int64))], 8)
    assert (row.tokens.tolist(), row.words.tolist(), row.cut) == (tokens, [0] * len(tokens), False)


def test_padding_stands_behind_or_for_xlnet_before():
    one = Encoding("a", np.array([20], np.int32), np.array([0]))
    shape = template(GPT, VOCABULARY)
    batch = shape.batch([shape.row([TEXT], 24), shape.row([one], 24)], 3, 7)
    assert batch["tokens"].tolist() == [[2, 10, 11, 12, 13, 14, 9], [2, 20, 9, 9, 9, 9, 9], [9] * 7]
    assert batch["documents"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0], [0] * 7]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 1, 0, 0, 0, 0, 0], [0] * 7]
    shape = template(XLNET, VOCABULARY)
    batch = shape.batch([shape.row([one], 24)], 1, 5)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "tokens": [[9, 9, 20, 5, 4]],
        "documents": [[0, 0, 1, 1, 1]],
        "positions": [[0, 0, 0, 1, 2]],
        "segments": [[0, 0, 0, 0, 2]],
        "words": [[0, 0, 1, 0, 0]],
    }


def test_how_long_a_row_may_be():
    bert, xlnet = template(BERT, VOCABULARY), template(XLNET, VOCABULARY)
    assert row_length(BERT, bert, None) == row_length(BERT, bert, 24) == 24
    assert (row_length(XLNET, xlnet, None), row_length(XLNET, xlnet, 3000)) == (512, 3000)
    with pytest.raises(ValueError, match="--length 25 is longer than the model's 24 positions"):
        row_length(BERT, bert, 25)
    for short in (2, 0, -1):
        with pytest.raises(ValueError, match=f"--length {short} leaves no room .* choose 3 or more"):
            row_length(BERT, bert, short)


def test_a_model_without_a_template_is_named():
    with pytest.raises(ValueError, match="Vocabulary does not say how it reads a text"):
        template(VOCABULARY, VOCABULARY)


def test_batches_have_few_lengths():
    assert lengths(512) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert (lengths(20), lengths(8), lengths(5)) == ([8, 12, 16, 20], [8], [5])


@given(st.lists(st.integers(1, 40)), st.integers(1, 5))
def test_rows_of_about_equal_length_come_together(counts: list[int], size: int):
    rows = [
        Row(np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32), False) for count in counts
    ]
    groups = list(grouped(enumerate(rows), size, 40))
    assert sorted(number for _, group in groups for number, _ in group) == list(range(len(rows)))
    for length, group in groups:
        assert 1 <= len(group) <= size
        for number, row in group:
            assert row is rows[number]
            assert length == min(n for n in lengths(40) if n >= counts[number])
    short = Counter(length for length, group in groups if len(group) < size)
    assert all(count == 1 for count in short.values())
