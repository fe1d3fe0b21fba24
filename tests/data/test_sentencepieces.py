from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import sentencepiece

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.sentencepieces import SentencePiece, sample, short_lines
from ctx_jax.data.tokenizers import load_tokenizer


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


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_pieces_are_the_library_s_own(trained, name):
    tokenizer = trained(name)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / "sentencepiece.model"))
    speech = tokenizer.normalize(next(documents(Sotu().passages("train"))))
    same = total = 0
    for line in filter(None, speech.split("\n")):
        # Word by word they are equal; in a line too, unless two spellings of a word are equally probable: there the
        # rounding of what stands before it decides in the library.
        ids = tokenizer.encode(line).ids.tolist()
        assert ids == [i for word in line.split(" ") for i in (processor.encode(word) or processor.encode("  ")[1:])]
        same += ids == processor.encode(line)
        total += 1
    assert same > 0.9 * total > 5


def test_pieces_of_a_word_do_not_depend_on_what_stands_before(tokenizer):
    # In fp32, a long sum before it makes the library spell such words in another way.
    word = tokenizer.encode("oooooooo").ids
    for before in (1, 30, 1000, 30_000):
        assert np.array_equal(tokenizer.encode("citizens, " * before + "oooooooo").ids[-len(word) :], word)


def test_places_of_pieces(tokenizer):
    piece = tokenizer._processor.id_to_piece
    encoding = tokenizer.encode("ab  😀\n\n of\n▁x")
    stands = [(piece(int(i)), start) for i, start in zip(encoding.ids, encoding.starts, strict=True)]
    # "▁" counts where the text goes on after it; a line's own first one takes no place.
    assert ("<0xF0>", 4) in stands
    assert [start for name, start in stands if name == "<0x0A>"] == [5, 6, 10]
    assert stands[-5:] == [("▁", 11), ("<0xE2>", 11), ("<0x96>", 11), ("<0x81>", 11), ("x", 12)]
    assert encoding.starts[encoding.word_starts()].tolist() == [0, 4, 8, 11]
    # A passage that goes on within a line.
    assert tokenizer.encode(" of", continued=True).ids.tolist() == tokenizer.encode("of").ids.tolist()
    assert tokenizer.encode(" of", continued=True).starts.tolist() == [1]
    assert tokenizer.encode("of", continued=True).starts[0] == 0
    assert piece(int(tokenizer.encode("of", continued=True).ids[0])) in ("of", "o")


def test_lines_and_runs_of_spaces(tokenizer):
    """A word has the ids that it has alone; a line end is one id, and nothing stands between two of them."""

    def word(text: str) -> list[int]:
        return tokenizer.encode(text).ids.tolist()

    line_end, empty = word("\n"), word("  ")[:1]
    assert word("\n\na\n\n\nb\n") == [*line_end * 2, *word("a"), *line_end * 3, *word("b"), *line_end]
    assert word("a  b \nc") == [*word("a"), *empty, *word("b"), *empty, *line_end, *word("c")]
    assert word("a\n \nb") == [*word("a"), *line_end, *empty * 2, *line_end, *word("b")]


def test_training_is_kept(tmp_path, tokenizer):
    speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))
    again = SentencePiece(vocabulary_size=400).train(speeches, tmp_path / "again")
    assert again.fingerprint == tokenizer.fingerprint
    assert SentencePiece(vocabulary_size=400).train([], tmp_path / "again").fingerprint == tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint
    assert again.vocabulary.size == 400
    other = SentencePiece(vocabulary_size=400, normalization="NFKC").train(speeches, tmp_path / "other")
    assert other.fingerprint != tokenizer.fingerprint
    assert other.encode("ﬁne").text == "fine"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no text to learn pieces from"),
        ([" \n\t"], "no text to learn pieces from"),
        (["a few words only"], r"vocabulary_size 2048 does not fit a training text of 16 bytes: give more text$"),
        (["".join(map(chr, range(0x4E00, 0x5A00)))], r"choose more than \d{4} or a lower character_coverage$"),
        ([" ".join(f"{n} a" for n in range(1500))], r"choose at most \d+ or give more text$"),
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
    with pytest.raises(ValueError, match="training_characters 0 hold no text"):
        SentencePiece(training_characters=0)


def test_sample_keeps_what_fits_in_order():
    lines = [f"{i:04d}" for i in range(1000)]
    assert sample(lines, 4000) == lines
    some = sample(lines, 400)
    assert len(some) == 100
    assert some == sorted(some) == sample(lines, 400)
    assert 300 < np.mean([int(line) for line in some]) < 700


def test_short_lines():
    assert list(short_lines("a b\n\nc\td\u2028e  f▁g")) == ["a b", "c", "d", "e  f", "g"]
    words = " ".join(["word"] * 5000)
    parts = list(short_lines(words))
    assert max(map(len, parts)) <= 2000
    assert " ".join(parts) == words
    assert "".join(short_lines("x" * 5000)) == "x" * 5000
