from __future__ import annotations

import json

import numpy as np
import pytest

from ctx_jax.data.symbols import Bytes, Characters, Words


def test_bytes(tmp_path):
    tokenizer = Bytes().train([], tmp_path / "bytes")
    encoding = tokenizer.encode("aé\n日 x")
    assert encoding.ids.tolist() == [7 + byte for byte in "aé\n日 x".encode()]
    assert encoding.starts.tolist() == [0, 1, 1, 2, 3, 3, 3, 4, 5]
    assert np.flatnonzero(encoding.word_starts()).tolist() == [0, 4, 8]
    assert tokenizer.vocabulary.size == Bytes().vocabulary_size == 263
    assert tokenizer.decode([2, 7 + 0xC3, 3, 7 + 0xA9, 7 + 0xFF]) == "é\ufffd"
    assert Bytes(normalization="NFC").load(tmp_path).encode("e\u0301").text == "é"


def test_characters(tmp_path):
    tokenizer = Characters(vocabulary_size=10).train(["banana ", "bn"], tmp_path / "characters")
    assert json.loads((tmp_path / "characters" / "characters.json").read_text()) == ["a", "n", "b"]
    encoding = tokenizer.encode("ban a\U0010ffff")
    assert encoding.ids.tolist() == [9, 7, 8, 1, 7, 1]
    assert encoding.starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert tokenizer.decode(encoding.ids) == tokenizer.normalize("ban a\U0010ffff") == "ban\ufffda\ufffd"
    assert encoding.word_starts().tolist() == [True, False, False, False, True, False]
    assert tokenizer.vocabulary.size == 10
    rare = Characters(minimum_count=3).train(["banana ", "bn"], tmp_path / "rare")
    assert rare.decode(rare.encode("banana ").ids) == "\ufffdanana\ufffd"


def test_words(tmp_path):
    texts = ["the cat <unk>  saw\n= the dog =\n\n", "the <unk> dog"]
    tokenizer = Words().train(texts, tmp_path / "words")
    # By falling count, then by name; the line end among them, the text's own unknown word not.
    assert json.loads((tmp_path / "words" / "words.json").read_text()) == ["\n", "the", "=", "dog", "cat", "saw"]
    encoding = tokenizer.encode("  the\tfox \n\n= <unk>\u2028the")
    assert encoding.ids.tolist() == [8, 1, 7, 7, 9, 1, 8]
    assert encoding.starts.tolist() == [2, 6, 10, 11, 12, 14, 20]
    assert encoding.word_starts().tolist() == [True, True, False, False, True, True, True]
    assert tokenizer.decode(encoding.ids) == tokenizer.normalize(encoding.text) == "the <unk>\n\n= <unk> the"
    assert tokenizer.vocabulary.size == 13
    assert tokenizer.decode([2, 8, 10, 3, 0]) == "the dog"


def test_words_are_limited(tmp_path):
    text = "a a a b b c\n"
    few = Words(vocabulary_size=10).train([text], tmp_path / "few")
    assert few.normalize(text) == "a a a b b <unk>\n"
    assert few.vocabulary.size == 10
    common = Words(minimum_count=3).train([text], tmp_path / "common")
    assert common.normalize(text) == "a a a <unk> <unk> <unk>\n"  # the line end is always known
    assert common.vocabulary.size == 9


@pytest.mark.parametrize(
    ("config", "documents", "message"),
    [
        (Characters(), [], "there is no text to count in: the train split of the corpus is empty"),
        (Words(), [" \n"], "there is no text to count in: the train split of the corpus is empty"),
        (Words(), ["<unk>"], "there is no text to count in: the train split of the corpus is empty"),
        (Words(minimum_count=3), ["a b b"], "minimum_count 3 leaves nothing: choose at most 2 or give more text"),
        (Characters(minimum_count=3), ["abb"], "minimum_count 3 leaves nothing: choose at most 2 or give more text"),
    ],
)
def test_too_little_text(tmp_path, config, documents, message):
    with pytest.raises(ValueError, match=message):
        config.train(documents, tmp_path / "symbols")
    assert not (tmp_path / "symbols").exists()


def test_bad_configs():
    with pytest.raises(ValueError, match="vocabulary_size 8 leaves no room beside 7 special ids: choose"):
        Characters(vocabulary_size=8)
    with pytest.raises(ValueError, match="vocabulary_size 8 leaves no room beside the line end and 7 special ids"):
        Words(vocabulary_size=8)
    with pytest.raises(ValueError, match="minimum_count 0 is less than 1"):
        Words(minimum_count=0)
