"""What holds for every kind of tokenizer."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data.corpora import Passage
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.data.symbols import Bytes, Characters, Words
from ctx_jax.data.tokenizers import (
    Memo,
    Pretrained,
    counted,
    load_tokenizer,
    named,
    save_config,
    train_texts,
    unicode_normalized,
    word_characters,
)
from ctx_jax.generation.text import certain
from tests.golden.published import FAMILIES

NAMES = ["unigram", "bpe", "wordpiece", "wordpiece_cased", "byte_bpe", "bytes", "characters", "words"]
WORDS_ALONE = ("WordPieceTokenizer", "PublishedWordPieceTokenizer", "PublishedWordBPETokenizer")
"""They keep words, but not the white space between them, and a word may have nothing that they keep."""
PIECES = "PublishedPiecesTokenizer"
"""It keeps words, too, as the published rules leave them, and spells a line as a whole."""
SPECIAL_TEXT = (
    "[MASK] [CLS] [SEP] [PAD] [UNK] [BOS] </s> <s> <pad> <unk> <mask> <cls> <sep> <|endoftext|> <0x0A> <0x41> ##a Ġa"
).split()
PARTS = [
    *" \n\t\r▁<s/>[MASK].a1!e\u0301\u0327é\x0b\x0c\x1c\x1f\x85\xa0\x00\x7f\xad",
    *"\u1680\u200b\u200d\u2028\u2029\u3000\ufeff",
    *"\ufffd\ufffe日本語漢字、한국어שלוםمرحباहिन्दीไทยßİΣςﬁ¨⅓😀\U000e0001\U0010ffff\u202e",
    *"  \n\n",
    *("👩\u200d👩\u200d👧", "🇩🇪", "aaaa", "333", "---", "  ", "\n\n", "\n ", " \n", "\r\n", "citizens", " the", "I'm"),
    *SPECIAL_TEXT,
]
HARD = st.lists(st.one_of(st.sampled_from(PARTS), st.characters(codec="utf-8")), max_size=25).map("".join)


@pytest.fixture(params=[*NAMES, *FAMILIES], scope="session")
def kind(request, trained):
    return trained(request.param)


@settings(max_examples=200, deadline=None)
@given(text=HARD)
def test_round_trip_places_and_words(kind, text):
    encoding = kind.encode(text)
    if type(kind).__name__ == PIECES:
        assert " ".join(encoding.text.split()) == encoding.text.removeprefix(" ")
    else:
        assert encoding.text == kept(kind, text)
    assert kind.decode(encoding.ids) == kind.normalize(text)
    assert not set(encoding.ids.tolist()) & {*kind.vocabulary.special}
    assert encoding.ids.dtype == np.int32
    assert encoding.ids.min(initial=kind.vocabulary.size) >= 0
    assert encoding.ids.max(initial=0) < kind.vocabulary.size
    assert len(encoding.starts) == len(encoding.ids) == len(encoding.word_starts())
    assert np.all(np.diff(encoding.starts) >= 0)
    # Words are those of str.split; the first token of each is at its first character.
    lone = [word if type(kind).__name__ == PIECES or kind.normalize(word) else "" for word in encoding.text.split()]
    starts = [i for i, c in enumerate(encoding.text) if not c.isspace() and (i == 0 or encoding.text[i - 1].isspace())]
    expected = [start for start, word in zip(starts, lone, strict=True) if word]
    assert encoding.starts[encoding.word_starts()].tolist() == expected
    assert all(lone) or type(kind).__name__ in WORDS_ALONE


def kept(kind, text: str) -> str:
    """The text in which words are found."""
    if type(kind).__name__ in WORDS_ALONE[1:]:
        return "".join(
            c for c in text if c in "\t\n\r" or (c != "\ufffd" and unicodedata.category(c) not in ("Cc", "Cf"))
        )
    return text if kind.normalization == "none" else unicodedata.normalize(kind.normalization, text)


@settings(max_examples=100, deadline=None)
@given(text=HARD)
def test_each_word_has_its_own_tokens(kind, text):
    if type(kind).__name__ == PIECES:
        return  # its rules are not to be applied twice: tests/interop
    encoding = kind.encode(text)
    begins = np.flatnonzero(encoding.word_starts())
    words = [kind.normalize(word) for word in encoding.text.split()]
    parts = np.split(encoding.ids, begins)[1:]
    for part, word in zip(parts, filter(None, words), strict=True):
        found = kind.decode(part).lstrip()
        assert found.startswith(word)
        assert not found.removeprefix(word).replace("\ufffd", "").strip()  # white space that is unknown


def legal_cuts(text: str) -> list[int]:
    """Before a line end or space, the last white space of its run; not between a line end and a space."""
    return [
        i
        for i in range(1, len(text) - 1)
        if text[i] in "\n " and not text[i + 1].isspace() and text[i - 1 : i + 1] != "\n "
    ]


@settings(max_examples=200, deadline=None)
@given(text=HARD, data=st.data())
def test_passages_have_the_ids_of_the_whole(kind, text, data):
    places = [i for i in legal_cuts(text) if text[i] == "\n" or type(kind).__name__ != PIECES]
    cuts = [i for i in places if data.draw(st.booleans())] or places
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    encodings = [kind.encode(part, continued=i > 0) for i, part in enumerate(parts)]
    whole = kind.encode(text)
    assert "".join(encoding.text for encoding in encodings) == whole.text
    assert np.concatenate([encoding.ids for encoding in encodings]).tolist() == whole.ids.tolist()
    assert np.concatenate([e.word_starts() for e in encodings]).tolist() == whole.word_starts().tolist()
    places = np.cumsum([0, *(len(encoding.text) for encoding in encodings)])
    starts = np.concatenate([e.starts + place for e, place in zip(encodings, places, strict=False)])
    assert starts.tolist() == whole.starts.tolist()


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(HARD, min_size=1, max_size=4))
def test_passages_cut_anywhere_keep_the_text(kind, parts):
    if type(kind).__name__ in (*WORDS_ALONE, "WordsTokenizer", PIECES):
        return  # a word that is cut is two to them
    parts = [part for part in parts if part]
    pairs = itertools.pairwise(map(kind.normalize, parts))
    if any(before.endswith("\n") and after.startswith(" ") for before, after in pairs):
        return  # passages are not cut between a line end and a space
    ids = [i for n, part in enumerate(parts) for i in kind.encode(part, continued=n > 0).ids.tolist()]
    assert kind.decode(ids) == "".join(kind.normalize(part) for part in parts)


def test_a_long_line_is_its_passages(kind):
    chance = np.random.default_rng(0)
    words = np.array("the of 333 ooo --have citizens aaaa, 12,000.50 naïve 日本 [MASK] x\u2028y".split(" "))
    text = ("\n" if type(kind).__name__ == PIECES else " ").join(chance.choice(words, 30_000))
    cuts = legal_cuts(text)[::5000]
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    joined = np.concatenate([kind.encode(part, continued=n > 0).ids for n, part in enumerate(parts)])
    assert np.array_equal(joined, kind.encode(text).ids)


@pytest.mark.parametrize("name", SPECIAL_TEXT)
def test_text_never_makes_special_ids(kind, name):
    for text in (name, f" {name}", f"a{name}b {name}\n{name}{name}"):
        ids = kind.encode(text).ids
        assert not set(ids.tolist()) & set(kind.vocabulary.special)
        assert kind.decode(ids) == kind.normalize(text)


def test_special_ids(kind):
    vocabulary = kind.vocabulary
    names = ("pad", "unknown", "begin", "end", "classification", "separator", "mask")
    special = [getattr(vocabulary, name) for name in names]
    assert special == list(range(7)) or hasattr(kind, "config")
    assert all(0 <= index < vocabulary.size for index in special)
    ids = kind.encode("the people").ids
    framed = [vocabulary.begin, *ids, vocabulary.mask, vocabulary.pad, vocabulary.classification, vocabulary.end]
    assert kind.decode(framed) == kind.decode(np.array(framed)) == kind.decode(ids) == "the people"


def test_any_ids_decode(kind):
    assert isinstance(kind.decode(np.arange(kind.vocabulary.size)), str)
    assert kind.decode([]) == ""
    assert kind.encode("").ids.tolist() == kind.encode("", continued=True).ids.tolist() == []


def test_pickled_tokenizers_are_the_same(kind):
    again = pickle.loads(pickle.dumps(kind))
    loaded = load_tokenizer(kind.folder)
    text = "The citizens\nof 日本 [MASK]"
    assert again.fingerprint == loaded.fingerprint == kind.fingerprint
    assert again.encode(text).ids.tolist() == loaded.encode(text).ids.tolist() == kind.encode(text).ids.tolist()
    assert len(pickle.dumps(kind)) < 1000


def test_fingerprints_differ(trained):
    names = [*NAMES, *FAMILIES]
    assert len({trained(name).fingerprint for name in names}) == len(names)
    assert Bytes(normalization="NFC").train([], trained("bytes").folder).fingerprint != trained("bytes").fingerprint


def test_training_gives_the_same_bytes_in_any_process(trained, tmp_path):
    program = """
import itertools, json, sys
from pathlib import Path
from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.serialization import from_json
speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))
for name in sys.argv[2:]:
    config = from_json(json.loads((Path(name) / "config.json").read_text()))
    config.train(iter(speeches), Path(sys.argv[1]) / Path(name).name)
"""
    folders = [trained(name).folder for name in NAMES]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program, tmp_path, *folders]
    subprocess.run(list(map(str, command)), env=environment, check=True)
    for folder in folders:
        files = sorted(file.name for file in folder.iterdir())
        assert files == sorted(file.name for file in (tmp_path / folder.name).iterdir())
        for file in files:
            assert (folder / file).read_bytes() == (tmp_path / folder.name / file).read_bytes(), folder / file


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk(trained, tmp_path, name):
    """One line that names the folder, and nothing half-written. The limit is on the size of a file."""
    program = """
import itertools, json, resource, sys
from pathlib import Path
from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.tokenizers import load_tokenizer
from ctx_jax.serialization import from_json
speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))
config = from_json(json.loads((Path(sys.argv[1]) / "config.json").read_text()))
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
config.train(iter(speeches), Path(sys.argv[2]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(trained(name).folder), str(tmp_path / "new")]
    said = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False).stderr
    reason = "[Errno 27] File too large (what was written is removed)"
    assert said.splitlines()[-1] == f"OSError: {reason}: '{tmp_path / 'new'}'"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", [*NAMES, "bert", "gpt", "roberta", "t5"])
def test_missing_and_damaged_folders(trained, tmp_path, name):
    source = trained(name).folder
    for file in sorted(source.iterdir()):
        copy = tmp_path / f"without-{file.name}"
        shutil.copytree(source, copy)
        (copy / file.name).unlink()
        message = "no tokenizer in" if file.name == "config.json" else f"is damaged: {file.name} is missing; delete"
        with pytest.raises(FileNotFoundError, match=message):
            load_tokenizer(copy)
        for number, content in enumerate([b"", b"\xff\xfe\x00garbage", b"[]", b"{}", b'["ab", 1]', b"null"]):
            copy = tmp_path / f"{number}-{file.name}"
            shutil.copytree(source, copy)
            (copy / file.name).write_bytes(content)
            if file.name == "merges.txt" and not content:
                continue  # no merges is a tokenizer too
            with pytest.raises(ValueError, match=r"is damaged: .*; delete the folder") as error:
                load_tokenizer(copy)
            assert "\n" not in str(error.value)
            assert str(copy) in str(error.value)


def test_a_foreign_config(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "vocab_size": 30522}')
    with pytest.raises(ValueError, match=r"config.json cannot be read .*; delete the folder"):
        load_tokenizer(tmp_path)
    save_config(Pretrained("elsewhere", vocabulary_size=9), tmp_path)
    with pytest.raises(ValueError, match="it does not describe a tokenizer"):
        load_tokenizer(tmp_path)


def test_pretrained(trained, tmp_path):
    tokenizer = trained("words")
    config = Pretrained(tokenizer.folder)
    assert config.vocabulary_size == tokenizer.vocabulary.size
    assert config.train(iter([]), tmp_path / "new").folder == config.load(tmp_path).folder == tokenizer.folder
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        _ = Pretrained(str(tmp_path)).vocabulary_size


def test_named(trained, tmp_path):
    assert named("unigram") == SentencePiece()
    assert named("bpe") == SentencePiece(model_type="bpe")
    assert named("wordpiece") == WordPiece()
    assert named("byte_bpe") == ByteLevelBPE()
    assert named("bytes") == Bytes()
    assert named("characters") == Characters()
    assert named("words") == Words()
    folder = trained("bytes").folder
    assert named(str(folder)) == Pretrained(Path(folder))
    with pytest.raises(ValueError, match=r"tokenizer 'unigrm' is neither a kind nor .*; did you mean 'unigram'\?"):
        named("unigrm")
    with pytest.raises(ValueError, match="is a folder without a tokenizer: choose unigram, bpe, "):
        named(str(tmp_path))


def test_progress_of_reading(monkeypatch):
    class Speeches:
        def fingerprint(self, split):
            return split

        def passages(self, split):
            return (Passage("né. " * 10, part == 0, part == 1, "en") for _ in range(50) for part in range(2))

    told = []
    texts = list(train_texts(Speeches(), lambda *done: told.append(done)))  # pyright: ignore[reportArgumentType]
    assert len(texts) == 100
    assert told == [(50, 5000)]
    monkeypatch.setattr("ctx_jax.data.tokenizers.TELL_SECONDS", 0.0)
    told.clear()
    list(train_texts(Speeches(), lambda *done: told.append(done)))  # pyright: ignore[reportArgumentType]
    assert len(told) > 50
    assert told == sorted(told)


def test_word_characters():
    for text in ["", " ", "a", " a", "ab  c\n", "日 本", "a\u3000b\x1cc\x85d", "\U0001f600 x"]:
        expected = [not c.isspace() and (i == 0 or text[i - 1].isspace()) for i, c in enumerate(text)]
        assert word_characters(text).tolist() == [*expected, False]


def test_unicode_normalized():
    assert unicode_normalized("e\u0301ﬁ", "none") == "e\u0301ﬁ"
    assert unicode_normalized("e\u0301ﬁ", "NFC") == "éﬁ"
    assert unicode_normalized("e\u0301ﬁ", "NFKC") == "éfi"


def test_memo_is_bounded_and_right():
    asked = []

    def encode(word: str) -> list[int]:
        asked.append(word)
        return [len(word)] * 2

    memo = Memo(encode)
    memo.words = 2

    def ids(words: list[str]) -> list[int]:
        return np.frombuffer(memo.joined(words), np.int32).tolist()

    assert ids(["a", "bb", "a", "x" * 41, "x" * 41]) == [1, 1, 2, 2, 1, 1, 41, 41, 41, 41]
    assert asked == ["a", "bb", "x" * 41, "x" * 41]
    assert ids(["ccc", "a"]) == [3, 3, 1, 1]
    assert len(memo) == 2
    assert ids([]) == []


def test_counting_forgets_the_rarest_words():
    texts = [" ".join(f"{n}-{i}" for i in range(1000)) + " often" for n in range(60)]
    counts = counted(str.split, iter(texts), memory=1 << 20)
    assert counts["often"] == 60
    assert 0 < len(counts) < 12_000
    assert len(counted(str.split, texts)) == 60_001


def test_what_is_certain_of_a_text_stays_when_it_grows(kind):
    chance, vocabulary = np.random.default_rng(0), kind.vocabulary
    text = np.array([index for index in range(vocabulary.size) if index not in vocabulary.special])
    for length in [20] * 50:
        ids = chance.choice(text, length).tolist()
        shown = [certain(kind.decode(ids[:n])) for n in range(length)]
        for before, after in itertools.pairwise([*shown, kind.decode(ids)]):
            assert after.startswith(before)
