"""How documents are told apart and cut: against naive code that holds the whole text."""

from __future__ import annotations

import itertools
import random
import re
import tracemalloc
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data import passages as module
from ctx_jax.data.passages import BLANK_LINE, LINE_END, SHARE, Passage, between, cut, documents, held_out

HARD = [
    "a",
    "b",
    "é",
    "e\u0301",
    "\u0301",
    "\u1100\u1161\u11a8",
    "\U0001f642",
    "\u65e5",
    "\0",
    "\ufeff",
    "[MASK]",
    "</s>",
]
SPACES = [" ", " ", "\n", "\n", "\n\n", "\t", "\u2028", "\x85", "\x0b", "\x1c", "\u3000", "\n \n", " \n"]
texts = st.lists(st.sampled_from(HARD + SPACES), max_size=60).map("".join)
pieces = st.integers(1, 9)


def in_pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def small(size: int) -> mock._patch:
    return mock.patch.object(module, "PASSAGE", size)


def naive_end(text: str, at: int, size: int) -> int:
    """Where the passage that begins at `at` ends."""
    if len(text) - at <= size:
        return len(text)

    def begins_line(place: int) -> bool:
        return text[place - 1] == "\n" and text[place] == " "

    def good(place: int, space: str) -> bool:
        last_of_run = place + 1 < len(text) and not text[place + 1].isspace()
        return text[place] == space and last_of_run and not begins_line(place)

    places = range(at + size, at, -1)
    second = [place for place in places if place >= at + size // 2]
    lines = [place for place in second if good(place, "\n")]
    for place in lines:
        if re.search(r"\n[^\S\n]*$", text[max(at + size // 2, at) : place]):
            return place
    for place in (*lines, *(place for place in places if good(place, "\n") or good(place, " "))):
        return place
    whole = (place for place in places if not (re.match("[\u0301\u1161\u11a8]", text[place]) or begins_line(place)))
    return next(whole, at + size)


@settings(deadline=None, max_examples=400)
@given(texts, st.integers(4, 12), pieces)
def test_passages_are_cut_where_the_rule_says(text, size, piece):
    text = text.strip("\n")
    with small(size):
        cuts = list(cut([in_pieces(text, piece)], "en"))
        assert cuts == list(cut([text], "en"))
    if not text.strip():
        assert cuts == []
        return
    ends = [0]
    while ends[-1] < len(text):
        ends.append(naive_end(text, ends[-1], size))
    assert [p.text for p in cuts] == [text[a:b] for a, b in itertools.pairwise(ends)]
    assert [p.first for p in cuts] == [True] + [False] * (len(cuts) - 1)
    assert [p.last for p in cuts] == [False] * (len(cuts) - 1) + [True]
    assert all(0 < len(p.text) <= size for p in cuts)


@settings(deadline=None, max_examples=400)
@given(texts, st.integers(4, 12), pieces)
def test_documents_between_separators(text, size, piece):
    lines = text.split("\n")
    blocks = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line)
        else:
            blocks.append([])
    with small(size):
        by_line = list(documents(cut(between(LINE_END, in_pieces(text, piece)), "en")))
        by_blank = list(documents(cut(between(BLANK_LINE, in_pieces(f"\n{text}\n", piece)), "en")))
        whole = list(documents(cut([in_pieces(text, piece)], "en")))
    assert by_line == [line for line in lines if line.strip()]
    assert by_blank == ["\n".join(block) for block in blocks if block]
    assert whole == ([text.strip("\n")] if text.strip() else [])


def test_a_paragraph_goes_before_a_line_before_a_space():
    with small(20):
        ends = lambda text: [p.text for p in cut([text], "en")]  # noqa: E731
        assert ends("aaaaaaaaa aa\n\nb\nc d eeeeeeeee") == ["aaaaaaaaa aa\n", "\nb\nc d eeeeeeeee"]
        assert ends("aaaaaaaaa aa\nb cc dd eeeeeeee") == ["aaaaaaaaa aa", "\nb cc dd eeeeeeee"]
        assert ends("aa\nbb ccccccccccccccccc dddd") == ["aa\nbb", " ccccccccccccccccc", " dddd"]
        assert ends("aa\nbbbbbbbbbbbbbbbbbbbbbbbb") == ["aa", "\nbbbbbbbbbbbbbbbbbbb", "bbbbb"]
        assert ends("a" * 45) == ["a" * 20, "a" * 20, "a" * 5]
        assert ends("a" * 18 + "\t\t b") == ["a" * 18 + "\t\t", " b"]


def test_marks_stay_with_their_character():
    with small(8):
        assert [p.text for p in cut(["a" * 7 + "e\u0301\u0301bbb"], "en")] == ["a" * 7, "e\u0301\u0301bbb"]
        assert [p.text for p in cut(["a" * 7 + "\u1100\u1161bbb"], "en")] == ["a" * 7, "\u1100\u1161bbb"]
        assert next(p.text for p in cut(["a" + "\u0301" * 90], "en")) == "a" + "\u0301" * 7  # no end of marks


def test_a_huge_text_is_never_held():
    block = "word " * 200_000

    def stream() -> Iterator[str]:
        for _ in range(30):
            yield block

    for make in (
        lambda: cut([stream()], "en"),
        lambda: cut(between(LINE_END, stream()), "en"),
        lambda: cut(between(BLANK_LINE, stream()), "en"),
        lambda: cut([iter(["\n" * 1_000_000] * 30 + ["end"])], "en"),
        lambda: cut([iter(["x", *["\n" * 1_000_000] * 30])], "en"),
        lambda: cut([(" " * count for count in [1_000_000] * 30)], "en"),
    ):
        tracemalloc.start()
        for _ in make():
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8_000_000  # of 30 million characters


def naive_parts(text: str, names: tuple[str, ...]) -> dict[str, str]:
    share = len(text) // SHARE
    edges = [len(text)]
    for number in range(len(names)):
        place = len(text) - share * (number + 1)
        found = [text.rfind(space, place - share, place) + 1 for space in "\n "]
        edges.append((found[0] or found[1] or place) if share else place)
    parts = {
        name: text[edges[i + 1] : edges[i]]
        for i, name in enumerate(name for name in ("test", "validation") if name in names)
    }
    return parts | {"train": text[: edges[-1]]}


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    st.sampled_from([("validation", "test"), ("test",), ("validation",)]),
    st.integers(4, 40),
)
def test_the_tail_of_each_of_few_documents_is_held_out(seeds, names, size):
    def made(seed: int) -> str:
        chance = random.Random(seed)
        return "x" + "".join(chance.choices("ab \n", (9, 9, 2, chance.choice((0, 0.3))), k=chance.randrange(120))) + "x"

    whole = [made(seed) for seed in seeds]
    with small(size):
        found = {
            split: list(documents(held_out(lambda: cut(whole, "en"), split, names, "en")))
            for split in ("train", *names)
        }
    for split, parts in found.items():
        expected = [naive_parts(text, names)[split].strip("\n") for text in whole]
        assert parts == [part for part in expected if part.strip()]


def test_long_documents_are_held_out_whole():
    whole = [f"{number} " + "word " * 10 + "end" for number in range(SHARE * 2 + 1)]
    with small(16):
        found = {
            split: list(held_out(lambda: cut(whole, "de"), split, ("validation", "test"), "de"))  # pyright: ignore
            for split in ("train", "validation", "test")
        }
    assert list(documents(found["validation"])) == [whole[9], whole[29]]
    assert list(documents(found["test"])) == [whole[19], whole[39]]
    assert list(documents(found["train"])) == [text for i, text in enumerate(whole) if i not in (9, 19, 29, 39)]
    assert {passage.language for passage in found["train"]} == {"de"}
    assert all(len(passage.text) <= 16 for passage in found["train"])


def test_passage_is_what_it_says():
    assert list(cut(["\na\n", " \n", "b"], "en")) == [Passage("a", True, True, "en"), Passage("b", True, True, "en")]
    assert all(type(passage) is Passage for passage in cut(["a"], "en"))


@pytest.mark.parametrize("split", ["dev", "Train"])
def test_unknown_split(split):
    with pytest.raises(ValueError, match=f"split '{split}' is not one of train, validation, test"):
        list(held_out(lambda: iter([]), split, (), "en"))
