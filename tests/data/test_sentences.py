from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data import sentences
from ctx_jax.data.sentences import WINDOW, sentence_characters


def split(text: str, language: str = "en") -> list[str]:
    starts = sentence_characters(text, language).tolist()
    return [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("en", ["Mr. J. F. Smith said so on Jan. 3 in the U.S. Senate.", "Did he?", "Yes!"]),
        ("en", ["It rose 3.14 % to $1.5 million, i.e. by a lot.", "Then it fell."]),
        ("en", ["Really?!", "Yes!!", "No."]),
        ("en", ["He said “I am. You are.” to her.", "Then he left."]),
        ("en", ['"One. Two." he said.', "Three."]),
        ("en", ["I don't know.", "I can't say.", "The dogs' food."]),
        ("en", ["club 's own .", "Its players ' goals ."]),
        ("en", ["See www.example.com for v2.0 of it.", "It is there."]),
        ("en", ["Wait... what?", "No."]),
        ("de", ["Er ist am 3. Mai z. B. da.", "Sie auch."]),
        ("fr", ["Il est là, p. ex. ici.", "Oui !", "Non ?"]),
        ("ru", ["Он пришёл.", "Она ушла!"]),
        ("el", ["Ήρθε.", "Πού είναι;"]),
        ("hi", ["यह है।", "वह है।"]),
        ("am", ["ሰላም።", "ደህና።"]),
        ("ar", ["هل جاء؟", "نعم."]),
        ("zh", ["你好。", "再见\uff01", "吗\uff1f"]),
        ("ja", ["これはペンです。", "はい。"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_known_sentences(language, expected):
    for join in ("" if language in ("zh", "ja") else " ", "\n\n", "\n \t\n\n", "\u3000", "\n"):
        assert split(f"\n \n {join.join(expected)} \n", language) == expected, join


def test_white_space():
    assert sentence_characters("", "en").tolist() == []
    assert sentence_characters(" \n\t\u2028\u3000\x85\n\n", "en").tolist() == []
    assert sentence_characters("\u3000 One.\u00a0Two.", "en").tolist() == [2, 7]
    assert sentence_characters(" " * 5000 + "One. Two.", "en").tolist() == [5000, 5005]
    # An initial before U+2028 makes the splitter panic if it sees that character.
    assert sentence_characters("Mr A.\u2028B. Then.", "en").tolist() == [0, 9]
    assert sentence_characters("A\x00b. C\x00. \x00", "en").tolist() == [0, 5, 9]


def test_blank_lines_end_a_sentence_and_line_ends_do_not():
    text = " = A heading = \n \n One line\nbroken in two . \n\n\n  Another\n"
    assert split(text) == ["= A heading =", "One line\nbroken in two .", "Another"]


@pytest.mark.parametrize("space", [" ", "\n"])
def test_long_paragraphs(space):
    """A window's cut starts no sentence, and hides none."""
    sentence = [f"Sentence number {i} has Mr. Smith and the U.S. Senate in it." for i in range(500)]
    assert split(space.join(sentence)) == sentence
    long = [" ".join(["word"] * 3000) + ".", "Short.", "X" * 5 * WINDOW + "."]
    assert split(space.join(long)) == long
    assert split("字" * 700 + "。" + "字" * 700 + "。", "zh") == ["字" * 700 + "。"] * 2


ALPHABET = st.sampled_from(
    [*"aB1 .?!\n\"'()“”«»…。:;-\x00\t\x0c\x1c\x85\u2028\u3000éßİ😀", "\u2019", "\uff01", "Mr.", "U.S. ", "\n\n"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ALPHABET, max_size=60).map("".join), st.sampled_from(["en", "de", "zh", "hy", "my", "xx"]))
def test_starts_ascend_and_are_never_white_space(text, language):
    starts = sentence_characters(text, language).tolist()
    assert starts == sorted(set(starts))
    assert not any(text[start].isspace() for start in starts)
    assert starts[:1] == ([len(text) - len(text.lstrip())] if text.strip() else [])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(ALPHABET, min_size=1, max_size=9).map("".join), min_size=1, max_size=8))
def test_paragraphs_are_apart(paragraphs):
    """Sentences of a paragraph do not depend on those around it."""
    place, expected = 0, []
    for paragraph in paragraphs:
        expected += (place + sentence_characters(paragraph, "en")).tolist()
        place += len(paragraph) + 2
    assert sentence_characters("\n\n".join(paragraphs), "en").tolist() == expected


def test_work_grows_with_the_length(monkeypatch):
    """The library, whose time grows with the square, sees short parts, and each a few times at most."""
    seen = []
    library = sentences.segment
    monkeypatch.setattr(sentences, "segment", lambda language, text: seen.append(len(text)) or library(language, text))
    text = "It 's the club 's own , it isn 't the players ' . The end is n't near ' . " * 2000
    sentence_characters(text, "en")
    assert max(seen) <= 2 * WINDOW
    assert sum(seen) < 4 * len(text)
    seen.clear()
    monkeypatch.setattr(sentences, "segment", lambda language, text: seen.append(len(text)) or [text])
    sentence_characters("x" * 10_000, "en")
    assert max(seen) == 2 * WINDOW
