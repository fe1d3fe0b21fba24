"""Every piece stands for the characters that it was made of, whatever the tokenizer changed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data.offsets import Speller, origins
from tests.data.test_tokenizers import HARD

NAMES = ["bpe", "wordpiece", "bytes", "bert", "gpt", "gpt2", "xlnet", "xlnet_uncased"]
TEXT = "Café cafe\u0301 ﬁne,  Straße\n the (10½) 日本語 zero\u200bwidth ΣΑΣ 😀 x\n\n 👩\u200d👧! İi naïve\tend ² b¨a\n"
"""Letters with accents, composed or not; what NFKC, lower case and BERT's cleaning make shorter or longer."""


@pytest.fixture(params=NAMES, scope="module")
def speller(request, trained) -> Speller:
    return Speller(trained(request.param))


def test_words_are_found_and_given_back(speller):
    located = speller.text(TEXT)
    for word in re.finditer(r"\S+", TEXT):
        found = located.find(*word.span())
        assert found is not None
        assert located.between(*found) == word[0], word[0]
    assert located.find(4, 4) is None


@settings(max_examples=20, deadline=None)
@given(text=HARD)
def test_pieces_are_those_of_the_whole_in_order(speller, text):
    located = speller.text(text)
    if speller.tokenizer.__class__.__name__ != "PublishedPiecesTokenizer":
        assert located.ids.tolist() == speller.tokenizer.encode(text).ids.tolist()
    assert len(located.ids) == len(located.words) == len(located.starts) == len(located.ends)
    for places in (located.starts, located.ends, located.words):
        assert np.all(np.diff(places) >= 0)
    assert np.all((located.starts >= 0) & (located.starts <= located.ends) & (located.ends <= len(text)))


@settings(max_examples=20, deadline=None)
@given(words=st.lists(HARD.map(lambda text: "".join(text.split())).filter(bool), min_size=1, max_size=5))
def test_a_words_first_piece_is_its_own(speller, words):
    spelled = speller.words(words)
    if speller.tokenizer.__class__.__name__ != "PublishedPiecesTokenizer":
        assert spelled.ids.tolist() == speller.tokenizer.encode(" ".join(words)).ids.tolist()
    assert len(spelled.firsts) == len(words)
    for number, first in enumerate(spelled.firsts.tolist()):
        own = np.flatnonzero(spelled.words == number + 1)
        assert first == -1 or first in own
        assert first != -1 or not speller.tokenizer.normalize(words[number]).strip("\ufffd ")


def test_origins_by_hand():
    begins, finishes = origins("abc", "a\u200bbc")  # one dropped
    assert (begins.tolist(), finishes.tolist()) == ([0, 2, 3, 4], [0, 1, 3, 4])
    begins, finishes = origins("fin", "ﬁn")  # two of one
    assert (begins.tolist(), finishes.tolist()) == ([0, 0, 1, 2], [0, 1, 1, 2])
    begins, finishes = origins("ab", "a\u0301b")  # a mark dropped
    assert (begins.tolist(), finishes.tolist()) == ([0, 2, 3], [0, 2, 3])
    begins, finishes = origins("xé", "xe\u0301")  # one of two
    assert (begins.tolist(), finishes.tolist()) == ([0, 1, 3], [0, 1, 3])
