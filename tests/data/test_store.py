from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.contract import Vocabulary
from ctx_jax.data import passages, sentences
from ctx_jax.data.corpora import Passage, TextFiles
from ctx_jax.data.preparation import prepare
from ctx_jax.data.sentences import sentence_characters
from ctx_jax.data.store import SENTENCE, WORD, check_tokenizer, encode_passages, in_context, open_store
from ctx_jax.data.tokenizers import Encoding

TEXTS = (
    "The Union is strong. Mr. J. F. Smith said so on Jan. 3 in the U.S. Senate.\nDid he? Yes!\n\nA heading\n\nThe end.",
    "One line\nbroken in two. And \u201ca quote.\u201d Then\u2028more.",
    "  an indented text 😀 [MASK] </s>. So.",
)
SENTENCES = [
    [
        "The Union is strong.",
        "Mr. J. F. Smith said so on Jan. 3 in the U.S. Senate.",
        "Did he?",
        "Yes!",
        "A heading",
        "The end.",
    ],
    ["One line\nbroken in two.", "And \u201ca quote.\u201d", "Then\u2028more."],
    ["an indented text 😀 [MASK] </s>.", "So."],
]


class Characters:
    """A character is a token, but for those that it leaves out: ids from 10, begin 2, end 3."""

    vocabulary = Vocabulary(size=1 << 21, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)

    def __init__(self, left_out: str = "", end: int = 3) -> None:
        self.left_out = left_out
        self.vocabulary = replace(self.vocabulary, end=end)

    def encode(self, text: str, continued: bool = False) -> Encoding:
        starts = np.array([i for i, character in enumerate(text) if character not in self.left_out], np.int64)
        return Encoding(text, np.array([10 + ord(text[i]) for i in starts], np.int32), starts)


def encode(passages, tokenizer=None):
    return encode_parts([*in_context(passages)], tokenizer or Characters())


def encode_parts(parts, tokenizer):
    return encode_passages(parts, tokenizer)


def document(*texts, language="en"):
    """A document in passages."""
    return [Passage(text, i == 0, i == len(texts) - 1, language) for i, text in enumerate(texts)]


def test_what_is_stored_of_a_document():
    encoded = encode(document("Ab c! D"))
    assert encoded.tokens.dtype == np.uint32
    assert encoded.tokens.tolist() == [2, *(10 + ord(character) for character in "Ab c! D"), 3]
    assert encoded.flags.tolist() == [0, WORD | SENTENCE, 0, 0, WORD, 0, 0, WORD | SENTENCE, 0]
    assert encoded.lengths.tolist() == [9]
    assert encoded.sizes.tolist() == [7]
    assert encoded.last.tolist() == [True]


def test_passages_of_a_document_are_the_document():
    """Wherever it is cut."""
    whole = encode(document("One two. Three\nfour.\nFive ü six."))
    parts = encode(document("One", " two. Three\nfour.", "\nFive", " ü six."))
    assert np.array_equal(parts.tokens, whole.tokens)
    assert np.flatnonzero(whole.flags & SENTENCE).tolist() == [1, 10, 22]
    assert np.array_equal(parts.flags, whole.flags)
    assert parts.lengths.tolist() == [4, 17, 5, 8]
    assert parts.sizes.tolist() == [3, 17, 5, 8]
    assert parts.last.tolist() == [False, False, False, True]


def test_sentences_begin_where_the_text_says(tokenizer):
    for text, expected in zip(TEXTS, SENTENCES, strict=True):
        encoded = encode(document(text), tokenizer)
        begins = np.flatnonzero(encoded.flags & SENTENCE)
        assert begins[0] == 1
        parts = [tokenizer.decode(part) for part in np.split(encoded.tokens, begins)[1:]]
        assert [part.strip() for part in parts] == expected


@pytest.mark.parametrize("text", [" ", "\n\n", "\u2028"])
def test_documents_without_words(tokenizer, text):
    encoded = encode(document(text), tokenizer)
    assert tokenizer.decode(encoded.tokens) == text
    assert not encoded.flags.any()
    assert encoded.tokens[0] == tokenizer.vocabulary.begin


def test_text_that_a_tokenizer_leaves_out():
    """What begins a sentence may have no token; the flag never falls on another document."""
    encoded = encode([*document("A! B"), *document("\x00\x00"), *document("\x00c! D\x00? E")], Characters("\x00"))
    assert encoded.lengths.tolist() == [6, 2, 9]
    assert np.flatnonzero(encoded.flags & SENTENCE).tolist() == [1, 4, 9, 12, 15]


DOCUMENTS = st.lists(
    st.tuples(
        st.lists(st.text("aB .?!\n\u2028ü\x00", min_size=1, max_size=12), min_size=1, max_size=3),
        st.sampled_from(["en", "de", "zh"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.booleans(), st.booleans())
def test_a_batch_of_passages_is_each_of_them(documents, one_boundary, leave_out):
    tokenizer = Characters("ü" if leave_out else "", end=2 if one_boundary else 3)
    contexts = [*in_context(part for texts, language in documents for part in document(*texts, language=language))]
    together, *alone = (encode_parts(part, tokenizer) for part in (contexts, *([one] for one in contexts)))
    for name, value in together._asdict().items():
        assert np.array_equal(value, np.concatenate([getattr(encoded, name) for encoded in alone])), name


WORDS = st.sampled_from(
    [
        "One.",
        "two",
        "Mr.",
        '"Yes.',
        'No."',
        "(It",
        "is.)",
        "“Go.",
        "on.”",
        "J.",
        "F.",
        "said!",
        "?!",
        "a\u2028B.",
        "etc.",
        "3.",
    ]
)
PARAGRAPH = st.lists(st.tuples(WORDS, st.sampled_from([" ", " ", " ", "\n", "  ", "\n ", ""])), min_size=9, max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARAGRAPH.map(lambda parts: "".join(map("".join, parts))), min_size=1, max_size=4))
def test_flags_do_not_depend_on_where_a_document_is_cut(paragraphs):
    """Paragraphs of up to ten windows, each of which is in reach of any cut."""
    text = "\n\n".join(paragraphs).strip("\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WINDOW": 30, "BEFORE": 300, "AFTER": 60}.items():
            patch.setattr(sentences, name, value)
        whole = encode(document(text))
        patch.setattr(passages, "PASSAGE", 120)
        parts = [*passages.cut([text], "en")]
        assert len(parts) > len(text) // 120 - 1
        assert np.array_equal(encode(parts).flags, whole.flags)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["One.", " Two."], [1, 6]),
        (["One\n two", "\nthree. Four."], [1, 17]),
        (["One. x\n", "\nTwo"], [1, 6, 9]),
        (["A. “One. Two.", " Three.” he said. End."], [1, 32]),
        (["A (b. C.", " D. e) F. G"], [1]),
        (["It was Mr.", " Smith."], [1]),
        (["It was Sm", "ith. A"], [1, 15]),
    ],
)
def test_flags_at_a_cut(parts, expected):
    for document_parts in (parts, ["".join(parts)]):
        flags = encode(document(*document_parts)).flags
        assert np.flatnonzero(flags & SENTENCE).tolist() == expected
        assert np.count_nonzero(flags & WORD) == len("".join(parts).split())


@pytest.mark.parametrize("seed", range(5))
def test_flags_of_long_paragraphs_do_not_depend_on_where_they_are_cut(seed):
    """However long: a few windows before the cut find the same sentences again."""
    chance = np.random.default_rng(seed)
    words = np.array(
        ["Mr. Smith", "ran", "home.", "He", "said", '"Stop."', "(twice)", "U.S.", "etc.", "Why?", "well, it's"]
    )
    text = " ".join(chance.choice(words, 30_000))
    whole = encode(document(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "PASSAGE", 10_000)
        parts = [*passages.cut([text], "en")]
    assert len(parts) > 12
    assert np.array_equal(encode(parts).flags, whole.flags)


@settings(max_examples=200, deadline=None)
@given(st.text("aB .?!\n\u2028ü\"'", min_size=1, max_size=40))
def test_flags_of_a_text(text):
    """Begin, a token a character, end: sentences are those of `sentence_characters`, words those of `split`."""
    flags = encode(document(text)).flags
    assert np.flatnonzero(flags & SENTENCE).tolist() == (1 + sentence_characters(text, "en")).tolist() or (
        # White space before the first sentence is part of it.
        np.flatnonzero(flags & SENTENCE).tolist() == [1, *(1 + sentence_characters(text, "en")[1:])]
    )
    assert (flags & WORD).sum() == len(text.split())


def test_boundary_of_one_id():
    """GPT-2's only boundary begins a document and ends none."""
    assert encode(document("A"), Characters(end=2)).tokens.tolist() == [2, 10 + ord("A")]


def speech(folder, tokenizer):
    """The store of a text."""
    (folder / "text.txt").write_text(TEXTS[0])
    return prepare(TextFiles(folder / "text.txt", whole=True), tokenizer, "test", folder)


def test_unusable_stores(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="no token store in"):
        open_store(tmp_path)
    folder = speech(tmp_path, tokenizer).folder
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(about | {"format": 0}))
    with pytest.raises(ValueError, match="has format 0, this version reads"):
        open_store(folder)
    for text in ("{", "[]", "{}", json.dumps(about | {"vocabulary": {"size": 3}})):
        (folder / "store.json").write_text(text)
        with pytest.raises(ValueError, match=r"is damaged: store\.json is not readable; delete the folder"):
            open_store(folder)
    for change in ({"tokens": None}, {"splitter": ...}, {"vocabulary": about["vocabulary"] | {"mask": 99999}}):
        changed = {name: value for name, value in (about | change).items() if value is not ...}
        (folder / "store.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"is damaged: store\.json is not readable; delete the folder"):
            open_store(folder)
    (folder / "store.json").write_text(json.dumps(about))
    offsets = (folder / "offsets.bin").read_bytes()
    (folder / "offsets.bin").write_bytes(bytes(len(offsets)))
    with pytest.raises(ValueError, match=r"is damaged: offsets\.bin does not fit \d+ tokens"):
        open_store(folder)
    (folder / "offsets.bin").write_bytes(offsets)
    os.truncate(folder / "tokens.bin", 10)
    with pytest.raises(ValueError, match=r"is damaged: tokens\.bin is not \d+ bytes"):
        open_store(folder)


def test_a_store_knows_its_tokenizer(tmp_path, tokenizer):
    store = speech(tmp_path, tokenizer)
    check_tokenizer(store, tokenizer)
    assert (tmp_path / store.tokenizer_folder).resolve() == tokenizer.folder
    other = replace(store, tokenizer="0123")
    with pytest.raises(ValueError, match=rf"0123 \(folder .*pieces\), not {tokenizer.fingerprint} .*: use that"):
        check_tokenizer(other, tokenizer)


def test_a_store_is_read_only(tmp_path, tokenizer):
    store = speech(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1
    for start, end in itertools.pairwise(store.offsets):
        assert store.tokens[start] == tokenizer.vocabulary.begin
        assert store.tokens[end - 1] == tokenizer.vocabulary.end
