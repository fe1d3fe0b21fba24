"""Text i is line i, whatever the file; what is wrong in it is named with its line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ctx_jax.data.files import _zstd
from ctx_jax.data.passages import PASSAGE, lacks
from ctx_jax.transfer.texts import STANDARD_INPUT, input_file, input_size, own_options, texts


def read(file: Path, content: bytes, field: str | None = None, errors="strict") -> list[str]:
    file.write_bytes(content)
    return list(texts(input_file(str(file)), field, errors))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n b \n\n", ["a", "", " b ", ""]),
        (b"\xef\xbb\xbfa\r\nb\rc\x0bd\xc2\x85e\n", ["a", "b", "c\x0bd\x85e"]),
        (b"[CLS] caf\xc3\xa9\n", ["[CLS] café"]),
    ],
)
def test_a_line_is_a_text_and_keeps_its_place(tmp_path: Path, content: bytes, expected: list[str]):
    assert read(tmp_path / "a.txt", content) == expected
    assert read(tmp_path / "a.txt.gz", gzip.compress(content)) == expected
    assert read(tmp_path / "a.tsv.zst", _zstd().compress(content)) == expected


def test_a_line_longer_than_any_passage_is_one_text(tmp_path: Path):
    lines = ["a", "long " * PASSAGE, "", "é" * (PASSAGE + 1), "b"]
    assert read(tmp_path / "a.txt", "\n".join(lines).encode()) == lines
    entries = [json.dumps({"text": line}) for line in lines]
    assert read(tmp_path / "a.jsonl", "\n".join(entries).encode()) == lines


def test_lines_of_json(tmp_path: Path):
    content = b'{"text": "a\\nb", "title": "t"}\n\n{"text": "", "title": "\\u00e9"}\n'
    assert read(tmp_path / "a.jsonl", content) == ["a\nb", ""]
    assert read(tmp_path / "a.ndjson.gz", gzip.compress(content), "title") == ["t", "é"]
    assert read(tmp_path / "a.data", content, "title") == ["t", "é"]


def test_what_is_wrong_is_named_with_its_line_and_our_options(tmp_path: Path):
    with pytest.raises(ValueError, match=r"a.txt line 3 is not UTF-8: convert .*, or set --errors replace"):
        read(tmp_path / "a.txt", b"a\nb\nc\xff\nd\n")
    assert read(tmp_path / "a.txt", b"a\nc\xff\n", errors="replace") == ["a", "c\ufffd"]
    with pytest.raises(ValueError, match=r"a.txt line 2 is not UTF-8"):
        read(tmp_path / "a.txt", b"a\n" + b"x" * 2 * PASSAGE + b"\xc3")
    with pytest.raises(ValueError, match=r"a.jsonl line 2 is not UTF-8"):
        read(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(
        ValueError, match=r"a.jsonl line 2: the field 'text' has half a surrogate pair .* set --errors replace"
    ):
        read(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(
        ValueError, match=r"line 2 has no field 'text'.*there are: 'txt'.*: rename one, or name another with --field"
    ):
        read(tmp_path / "a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ValueError, match=r"a.txt line 1 is not JSON"):
        read(tmp_path / "a.txt", b"a\n", "text")
    with pytest.raises(ValueError, match=r"a.txt.gz is damaged"):
        read(tmp_path / "a.txt.gz", gzip.compress(b"a\n" * 100)[:-9])


def test_an_input_is_one_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no text in .*none\.txt"):
        input_file(str(tmp_path / "none.txt"))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a\n")
    with pytest.raises(ValueError, match=r"--input .* names 2 files: choose one of them, as .*a.txt"):
        input_file(str(tmp_path))
    assert input_size(input_file(str(tmp_path / "a.txt"))) == 2


def test_standard_input():
    end, start = os.pipe()
    os.write(start, b"a\n\nb\n")
    os.close(start)
    before = os.dup(0)
    os.dup2(end, 0)
    try:
        file = input_file("-")
        assert (file, input_size(file)) == (STANDARD_INPUT, None)
        assert list(texts(file, None, "strict")) == ["a", "", "b"]
    finally:
        os.dup2(before, 0)
        for descriptor in (before, end):
            os.close(descriptor)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "a.txt is not UTF-8: convert it or leave the file out, or set --data.corpus.errors replace",
            "a.txt is not UTF-8: convert it or leave the file out, or set --errors replace",
        ),
        ("a line 2: unknown: mend it, or name all in --data.corpus.labels", "a line 2: unknown: mend it"),
        ("a: no 'x': rename one, or name another with --data.corpus.field", "a: no 'x': rename one"),
        (
            "a: 'I-x' follows 'O': mend it, or set --data.corpus.scheme IOB1 if that is the file's",
            "a: 'I-x' follows 'O': mend it",
        ),
        (
            "has 1 column: give two, or set --data.corpus.token-column and --data.corpus.tag-column",
            "has 1 column: give two, or set --token-column and --tag-column",
        ),
        (f"a.tsv: {lacks('test', ('test',), 'examples')}", "a.tsv: the split test needs 20 examples"),
        ("no data set: make one (a, b), or set --data.corpus.data-dir", "no data set: make one (a, b)"),
    ],
)
def test_a_command_names_the_options_that_it_has(message: str, expected: str):
    for kind in (ValueError, FileNotFoundError):
        with pytest.raises(ValueError) as caught, own_options("errors", "token-column"):
            raise kind(message)
        assert str(caught.value) == expected
    with pytest.raises(FileNotFoundError, match="no such run"), own_options():
        raise FileNotFoundError("no such run")
