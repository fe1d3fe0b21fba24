from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.subwords import (
    BERT_PIECES,
    ByteLevelBPE,
    WordPiece,
    bert_words,
    byte_characters,
    byte_letters,
    covering,
)

TEXT = st.text(
    st.one_of(st.sampled_from("  \n\tab.,'1é\u0301日😀İ\xa0#[]\x1c\x85"), st.characters(codec="utf-8")), max_size=30
)
SPACES = {ord(c): " " for c in map(chr, range(0x3001)) if c.isspace()}


def bert_reference(text: str, vocabulary: dict[str, int], lowercase: bool) -> list[int]:
    """BERT's tokenizer as its paper's code describes it, one character at a time; white space of any kind separates."""
    out = []
    for c in text.translate(SPACES):
        category, code = unicodedata.category(c), ord(c)
        if code in (0, 0xFFFD) or category in ("Cc", "Cf", "Cn", "Co", "Cs"):
            continue
        han = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F))
        han = (*han, (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F))
        out.append(f" {c} " if any(low <= code <= high for low, high in han) else c)
    text = "".join(out)
    if lowercase:
        text = unicodedata.normalize("NFD", text)
        text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
    words = []
    for word in text.split():
        new = True
        for c in word:
            if (c.isascii() and not c.isalnum() and c.isprintable()) or unicodedata.category(c).startswith("P"):
                words.append(c)
                new = True
            elif new:
                words.append(c)
                new = False
            else:
                words[-1] += c
    ids = []
    for word in words:
        pieces, start = [], 0
        while start < len(word) <= 100:
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in vocabulary:
                    break
            else:
                break
            pieces.append(vocabulary[piece])
            start = end
        ids += pieces if start == len(word) else [vocabulary["[UNK]"]]
    return ids


@pytest.mark.parametrize("name", ["wordpiece", "wordpiece_cased"])
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_wordpiece_is_bert_s(trained, name, text):
    # Python and the library may know different versions of Unicode: assigned long ago, or left out.
    text = "".join(c for c in text if unicodedata.category(c) != "Cn" and unicodedata.ucd_3_2_0.category(c) != "Cn")
    tokenizer = trained(name)
    pieces = (tokenizer.folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    encoding = tokenizer.encode(text)
    assert encoding.ids.tolist() == bert_reference(encoding.text, vocabulary, tokenizer.lowercase)


def test_wordpiece_on_known_text(trained):
    uncased, cased = trained("wordpiece"), trained("wordpiece_cased")
    assert uncased.normalize("Thé\u200b  CITIZENS, of\n日本.\x00 ☃") == "the citizens , of [UNK] [UNK] . [UNK]"
    assert cased.normalize("The [MASK] of") == "The [ [UNK] ] of"
    assert uncased.decode(uncased.encode("citizens, of the citizens").ids) == "citizens , of the citizens"
    encoding = uncased.encode("\u200dof \ufeff the\u200d the")  # what is dropped takes no token, but keeps its place
    assert encoding.ids.tolist() == uncased.encode("of the the").ids.tolist()
    assert encoding.starts.tolist() == [0, 6, 11]
    assert uncased.encode("x" * 101).ids.tolist() == [uncased.vocabulary.unknown]


def test_wordpiece_learns_frequent_words(trained):
    pieces = (trained("wordpiece").folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(pieces) == len(set(pieces)) == 500
    assert pieces[:7] == list(BERT_PIECES.values())
    assert {"the", "of", "##ing"} <= set(pieces)
    assert not any(any(c.isupper() for c in piece) for piece in pieces[7:])
    assert any(any(c.isupper() for c in piece) for piece in trained("wordpiece_cased")._pieces[7:])


def test_wordpiece_learns_from_text_without_spaces(tmp_path):
    config = WordPiece(vocabulary_size=15, character_coverage=1.0)
    tokenizer = config.train(["漢字漢字。かな、かな、漢"], tmp_path / "w")
    assert tokenizer.normalize("漢字。かなx") == "漢 字 。 [UNK]"
    # A character that is always a word needs no piece for the inside of one.
    assert tokenizer._pieces[7:] == [*"、。かな字漢", "##な", "かな"]


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_byte_level_bpe_is_the_library_s(trained, text):
    # The whole text in one, by GPT-2's rule.
    tokenizer = trained("byte_bpe")
    files = [str(tokenizer.folder / name) for name in ("vocab.json", "merges.txt")]
    whole = tokenizers.Tokenizer(models.BPE.from_file(*files))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode(text).ids.tolist() == whole.encode(text).ids


def test_byte_level_bpe_on_known_text(trained):
    tokenizer = trained("byte_bpe")
    encoding = tokenizer.encode("é  the\n\n😀")
    texts = [tokenizer._bytes[i] for i in encoding.ids.tolist()]
    assert texts == [b"\xc3", b"\xa9", b" ", b" the", b"\n", b"\n", *(bytes([byte]) for byte in "😀".encode())]
    assert encoding.starts.tolist() == [0, 0, 2, 3, 6, 7, 8, 8, 8, 8]
    assert tokenizer.vocabulary.size == 500
    assert tokenizer.decode([tokenizer.encode("é").ids[0]]) == "\ufffd"


def test_byte_letters_are_gpt2_s():
    letters = byte_letters()
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(letters.values()) == list(range(256))
    assert (letters["Ġ"], letters["Ċ"], letters["a"], letters["Ń"]) == (0x20, 0x0A, 0x61, 0xAD)


def test_byte_characters():
    assert byte_characters("aé日😀").tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert byte_characters("").tolist() == [0]


def test_covering():
    assert covering({"aab": 10, "c": 1}, 1.0) == {"a", "b", "c"}
    assert covering({"aab": 10, "c": 1}, 0.95) == {"a", "b"}
    assert covering({"ba": 1}, 0.5) == {"a"}


SPEECH = next(documents(Sotu().passages("train")))


@pytest.mark.parametrize(
    ("config", "documents", "message"),
    [
        (WordPiece(), [], "there is no text to learn pieces from"),
        (WordPiece(), [" \n\u200d"], "there is no text to learn pieces from"),
        (WordPiece(), ["ab ab abc"], r"vocabulary_size 30522 does not fit .*: choose at most 1\d or give more text"),
        (WordPiece(30), [SPEECH], r"vocabulary_size 30 does not fit .*: choose more than \d+ or a lower character_cov"),
        (ByteLevelBPE(), [], "there is no text to learn pieces from"),
        (ByteLevelBPE(), [SPEECH], r"vocabulary_size 50257 does not fit .*: choose at most \d+ or give more text"),
        (ByteLevelBPE(), ["a"], r"vocabulary_size 50257 does not fit .*: give more text"),
    ],
)
def test_too_little_text(tmp_path, config, documents, message):
    with pytest.raises(ValueError, match=message) as error:
        config.train(documents, tmp_path / "pieces")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "pieces").exists()


def test_the_size_that_the_message_names_is_right(tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary_size 14 does not fit .* choose at most 13 or give more text"):
        WordPiece(vocabulary_size=14).train(["ab ab abc"], tmp_path / "pieces")
    tokenizer = WordPiece(vocabulary_size=13).train(["ab ab abc"], tmp_path / "pieces")
    assert tokenizer._pieces[7:] == ["a", "b", "c", "##b", "##c", "ab"]


def test_bad_configs():
    with pytest.raises(ValueError, match="vocabulary_size 8 is too small: 7 are special"):
        WordPiece(vocabulary_size=8)
    with pytest.raises(ValueError, match=r"character_coverage 0.5 is not in"):
        WordPiece(character_coverage=0.5)
    with pytest.raises(ValueError, match="vocabulary_size 263 is too small: 263 are special or bytes"):
        ByteLevelBPE(vocabulary_size=263)


def test_library_offsets_are_characters():
    words = bert_words(True, {"[UNK]": 0, "a": 1, "##b": 2})
    encoding = words.encode("\u200dÁb", add_special_tokens=False)
    assert encoding.ids == [1, 2]
    assert np.array(encoding.offsets)[:, 0].tolist() == [1, 2]
