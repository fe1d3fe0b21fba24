from __future__ import annotations

from pathlib import Path

import pytest

from ctx_jax.data.lines import lines, streamed


def test_lines_are_numbered_and_what_is_no_utf8_is_found_in_its_line(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\n\r\ncaf\xc3\xa9\ncaf\xe9")
    read = lines(file, "strict")
    assert [next(read) for _ in range(3)] == [(1, "one"), (2, ""), (3, "café")]
    with pytest.raises(ValueError, match=r"a.txt line 4 is not UTF-8: convert the file to UTF-8, or set"):
        next(read)
    assert list(lines(file, "replace"))[-1] == (4, "caf\ufffd")


def test_a_long_line_comes_in_pieces_of_which_one_is_at_fault(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"short\n" + b"x" * 3_000_000 + b"\xe9")
    read = streamed(file, "strict")
    assert next(read) == "short"
    long = next(read)
    assert not isinstance(long, str)
    with pytest.raises(ValueError, match=r"a.txt line 2 is not UTF-8"):
        list(long)
