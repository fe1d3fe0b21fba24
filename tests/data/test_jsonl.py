"""Long lines of JSON, whose texts are read in pieces: as json.loads reads the whole."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctx_jax.data import jsonl as module
from ctx_jax.data.corpora import TextFiles, documents
from ctx_jax.data.files import Errors
from ctx_jax.data.jsonl import json_texts, without_long_strings

FILE = Path("a.jsonl")
PARTS = [*('a "\\/\n\r\té日🙂\u2028\ufeff'), "\\\\", "\r\n", "0000001", "u12"]
HALVES = [*'a"\\u{:, \n', "d8", "dc", "00", "\\ud83d", "\\ude42", "\\n"]
hard = st.lists(st.sampled_from(PARTS), max_size=25).map("".join)
leaves = st.one_of(st.none(), st.integers(), hard)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


def in_pieces(text: str, size: int):
    return (text[at : at + size] for at in range(0, len(text), size))


def small(size: int) -> mock._patch:
    return mock.patch.object(module, "PASSAGE", size)


def read(line: str, size: int = 8, piece: int = 3, errors: Errors = "strict") -> list[str]:
    with small(size):
        found = json_texts(FILE, iter([in_pieces(line, piece)]), "text", errors)
        return [text if isinstance(text, str) else "".join(text) for text in found]


@settings(deadline=None, max_examples=500)
@given(hard, st.dictionaries(hard, values, max_size=3), st.booleans(), st.integers(6, 12), st.integers(1, 9))
def test_as_json_reads_the_whole(text, more, ascii_, size, piece):
    line = json.dumps({**more, "text": text, "z": [text, 1]}, ensure_ascii=ascii_)
    assert read(line, size, piece) == [text.replace("\r\n", "\n").replace("\r", "\n")]
    with small(size):
        plain, strings = without_long_strings(in_pieces(line, piece))
    long = {str(number).zfill(size + 1): b"".join(taken).decode() for number, taken in enumerate(strings)}

    def restored(value):
        if isinstance(value, dict):
            return {restored(name): restored(inner) for name, inner in value.items()}
        return [restored(inner) for inner in value] if isinstance(value, list) else long.get(value, value)

    assert restored(json.loads(plain)) == json.loads(line)
    assert all(len(text) > 0 for text in long.values())


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(HALVES)), st.integers(4, 9), st.integers(1, 9))
@example([r"\ud83d", r"\ud83d", r"\ude42"], 4, 1)  # the second half of a pair belongs to the nearest first one
def test_what_is_not_json_is_refused(parts, size, piece):
    line = '{"text": "' + "".join(parts) + '"}'
    try:
        text = json.loads(line)["text"]
    except json.JSONDecodeError:
        with pytest.raises(ValueError, match=r"a\.jsonl line 1 is not JSON: .") as caught:
            read(line, size, piece)
        assert "\n" not in str(caught.value)
        return
    except KeyError:
        return
    if not isinstance(text, str):
        return
    expected = module.SURROGATE.sub("\ufffd", text).replace("\r", "\n")
    assert read(line, size, piece, "replace") == [expected]
    if module.SURROGATE.search(text):
        with pytest.raises(ValueError, match=r"a\.jsonl line 1: the field 'text' has half a surrogate pair"):
            read(line, size, piece)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "no end of it', "is not JSON: Unterminated string"),
        ('{"text": "a long one", \\u0041', "is not JSON: Expecting property name"),
        ('{"text": "a long \\u12 one"}', "is not JSON: Invalid"),
        ('["a long text alone"]', "is no object: each line must be like"),
        ('{"a long name of a field": 1}', r"has no field 'text' \(there are: .*\)"),
        ('{"text": ["a long text"]}', "has a field 'text' that is no text but list"),
    ],
)
def test_a_long_bad_line(line, message):
    with pytest.raises(ValueError, match=message):
        read(line)


def test_lines_have_a_largest_size(tmp_path, monkeypatch):
    lines = [json.dumps({"text": "word " * 200_000}), json.dumps({"text": "b", "x": [1] * 300_000})]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    whole = TextFiles(file, whole=True)
    assert [len(text) for text in documents(whole.passages("train"))] == [1_000_000, 1]
    monkeypatch.setattr(module, "BESIDE", 1 << 19)
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 has more than 0 MiB beside its longest texts: give each"):
        list(whole.passages("train"))
    monkeypatch.setattr(module, "LINE", 1 << 19)
    with pytest.raises(ValueError, match=r"a\.jsonl line 1 is longer than 0 MiB: break its text into several lines"):
        list(whole.passages("train"))


@pytest.mark.parametrize("emoji", [1, 10_000])
@pytest.mark.parametrize("ascii_", [False, True])
def test_a_long_line_is_held_once(tmp_path, emoji, ascii_):
    words = ["word "] * 1_600_000
    for place in random.Random(0).sample(range(len(words)), emoji):
        words[place] = "🙂 "
    text = "".join(words) + "."
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": text}, ensure_ascii=ascii_))
    tracemalloc.start()
    count = sum(len(passage.text) for passage in TextFiles(file, whole=True).passages("train"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == len(text)
    assert peak < 8_000_000 + 64 * module.PASSAGE  # as one string it would take 32,000,000
    (again,) = documents(TextFiles(file, whole=True).passages("train"))
    assert again == text
