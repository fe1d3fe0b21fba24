from __future__ import annotations

import dataclasses
import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.sentencepieces import SentencePiece, sample, short_lines
from ctx_jax.data.tokenizers import load_tokenizer, prepare_tokenizer

HARD = st.text(
    st.one_of(st.sampled_from(" \n\t\r▁<s/>[MASK]é\u0301\u2028\u3000\x00\xa0😀日.a"), st.characters(codec="utf-8")),
    max_size=40,
)


@settings(max_examples=500, deadline=None)
@given(text=HARD)
def test_round_trip_and_places(tokenizer, text):
    encoding = tokenizer.encode(text)
    assert encoding.text == unicodedata.normalize("NFC", text).replace("▁", " ")
    assert tokenizer.decode(encoding.ids) == encoding.text
    assert not set(encoding.ids.tolist()) & {*tokenizer.vocabulary.special, tokenizer.vocabulary.unknown}
    # Every token stands at the start of what it decodes to; words are those of str.split.
    assert np.all(np.diff(encoding.starts) >= 0)
    starts = [i for i, c in enumerate(encoding.text) if not c.isspace() and (i == 0 or encoding.text[i - 1].isspace())]
    assert encoding.starts[encoding.word_starts()].tolist() == starts
    assert len(starts) == len(encoding.text.split())


def test_word_starts_split_the_ids_into_the_words(tokenizer):
    text = "The  Union's\n\nstrength\tlies — as ever — in\nits  5,000 \u201ctowns\u201d 😀 x.\n"
    encoding = tokenizer.encode(text)
    begins = np.flatnonzero(encoding.word_starts())
    parts = np.split(encoding.ids, begins[1:])
    assert [tokenizer.decode(part).strip() for part in parts] == text.split()


def test_a_word_has_the_same_pieces_after_a_space_and_a_line_end(tokenizer):
    ids = tokenizer.encode("citizens citizens\ncitizens").ids.tolist()
    piece = tokenizer.encode("citizens").ids.tolist()
    line_end = tokenizer.encode("\n").ids.tolist()
    assert ids == piece + piece + line_end + piece


@pytest.mark.parametrize(
    "name", ["<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>", "[MASK]", "<0x0A>", "<0x41>"]
)
def test_text_never_makes_special_ids(tokenizer, name):
    ids = tokenizer.encode(f"a{name}b {name}").ids
    assert tokenizer.decode(ids) == f"a{name}b {name}"
    assert ids.min() > max(tokenizer.vocabulary.special)
    assert tokenizer.encode("\n").ids[0] not in ids


def test_special_ids(tokenizer):
    vocabulary = tokenizer.vocabulary
    assert vocabulary.size == 400
    assert sorted([*vocabulary.special, vocabulary.unknown]) == list(range(7))
    assert (
        tokenizer.decode([vocabulary.begin, *tokenizer.encode("We the people").ids, vocabulary.end]) == "We the people"
    )


def test_training_is_deterministic_and_kept(tmp_path, tokenizer):
    speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))
    again = SentencePiece(vocabulary_size=400).train(speeches, tmp_path / "again")
    assert again.fingerprint == tokenizer.fingerprint
    assert (tmp_path / "again" / "sentencepiece.model").read_bytes()
    assert SentencePiece(vocabulary_size=400).train([], tmp_path / "again").fingerprint == tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint
    other = SentencePiece(vocabulary_size=400, normalization="NFKC").train(speeches, tmp_path / "other")
    assert other.fingerprint != tokenizer.fingerprint
    assert other.encode("ﬁne").text == "fine"


def test_prepared_tokenizers_are_kept_by_config_and_corpus(tmp_path):
    class Few:
        asked = 0

        def passages(self, split):
            assert split == "train"
            Few.asked += 1
            yield from itertools.islice(Sotu().passages("train"), 2)

        def fingerprint(self):
            return "few"

    small, smaller = SentencePiece(vocabulary_size=350), SentencePiece(vocabulary_size=340)
    one, two, again = (prepare_tokenizer(config, Few(), tmp_path) for config in (small, smaller, small))
    assert one.fingerprint == again.fingerprint != two.fingerprint
    assert Few.asked == 2  # the third does not read the text again
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_bpe(tmp_path):
    speeches = list(itertools.islice(documents(Sotu().passages("train")), 2))
    tokenizer = SentencePiece(vocabulary_size=350, model_type="bpe").train(speeches, tmp_path / "bpe")
    assert tokenizer.decode(tokenizer.encode(speeches[0]).ids) == speeches[0]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no text to learn pieces from"),
        ([" \n\t"], "no text to learn pieces from"),
        (
            ["a few words only"],
            r"vocabulary_size 2048 does not fit a training text of 16 bytes: choose at most \d+ or give",
        ),
    ],
)
def test_too_little_text(tmp_path, documents, message):
    with pytest.raises(ValueError, match=message) as error:
        SentencePiece().train(documents, tmp_path / "pieces")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "pieces").exists()


def test_bad_config():
    with pytest.raises(ValueError, match="vocabulary_size 100 is too small"):
        SentencePiece(vocabulary_size=100)
    with pytest.raises(ValueError, match="character_coverage 2 is not in"):
        dataclasses.replace(SentencePiece(), character_coverage=2)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_sample_keeps_what_fits_in_order():
    lines = [f"{i:04d}" for i in range(1000)]
    assert sample(lines, 4000) == lines
    some = sample(lines, 400)
    assert len(some) == 100
    assert some == sorted(some) == sample(lines, 400)
    assert 300 < np.mean([int(line) for line in some]) < 700


def test_short_lines():
    assert list(short_lines("a b\n\nc\td\u2028e  f")) == ["a b", "c", "d", "e  f"]
    words = " ".join(["word"] * 5000)
    parts = list(short_lines(words))
    assert max(map(len, parts)) <= 2000
    assert " ".join(parts) == words
    assert "".join(short_lines("x" * 5000)) == "x" * 5000
