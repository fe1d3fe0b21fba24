from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctx_jax.data.corpora import SHARE, Sotu, TextFiles, documents


def texts(corpus: TextFiles, split: str = "train") -> list[str]:
    return list(documents(corpus.passages(split)))  # pyright: ignore[reportArgumentType]


def everything(path: Path, **options) -> list[str]:
    """All documents of a path, nothing held out."""
    return texts(TextFiles(path, validation=path, test=path, **options))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_sotu_splits_by_speech():
    splits = {split: list(documents(Sotu().passages(split))) for split in ("train", "validation", "test")}
    assert {split: len(speeches) for split, speeches in splits.items()} == {"train": 225, "validation": 12, "test": 12}
    assert not set(splits["train"]) & set(splits["validation"] + splits["test"])
    assert splits["train"][0].startswith("Fellow-Citizens of the Senate and House of Representatives:\n\nI embrace")
    assert sum(map(len, splits["train"])) > 11_000_000


def test_sotu_does_not_import_pandas():
    code = (
        "import sys; from ctx_jax.data.corpora import Sotu\n"
        "next(Sotu().passages('test')); print('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_line_ends_and_marks(tmp_path):
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\xe2\x80\xa8still\xc2\x85three\x0bhere\n\n")
    assert everything(file) == ["one\ntwo\nthree\u2028still\x85three\x0bhere"]
    assert everything(file, document="line") == ["one", "two", "three\u2028still\x85three\x0bhere"]


def test_last_line_without_end_is_the_same_document(tmp_path):
    with_end, without = write(tmp_path / "a.txt", "one\ntwo\n"), write(tmp_path / "b.txt", "one\ntwo")
    assert everything(with_end) == everything(without)


def test_documents_between_blank_lines(tmp_path):
    file = write(tmp_path / "a.txt", "\n\na\nb\n \n\t\nc\n\n\n d\n")
    assert everything(file, document="blank_line") == ["a\nb", "c", " d"]
    assert everything(file, document="line") == ["a", "b", "c", " d"]


def test_empty_documents_are_left_out(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", " \n\n")
    write(tmp_path / "c.txt", "text")
    assert everything(tmp_path) == ["text"]


def test_folder_and_glob(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "d.md", "no")
    assert everything(tmp_path) == ["a.txt", "b.txt", "deep/c.txt"]
    assert everything(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert everything(tmp_path / "**" / "*.md") == ["no"]


@pytest.mark.parametrize("missing", ["nothing.txt", "empty", "*.none"])
def test_no_text(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no text in .*: give a text file"):
        everything(tmp_path / missing)


@pytest.mark.parametrize(
    ("good", "mark"), [(b"a", b""), ("é".encode(), b""), (b"a\n" * 9, b"\xef\xbb\xbf"), (b"b" * (1 << 20), b"")]
)
def test_bad_utf8_names_file_and_byte(tmp_path, good, mark):
    file = write(tmp_path / "bad.txt", mark + good + b"\xe9 rest of the text")
    with pytest.raises(ValueError, match=rf"bad\.txt is not UTF-8 at byte {len(mark + good)}: "):
        everything(file, document="line")


def test_truncated_utf8_at_the_end(tmp_path):
    with pytest.raises(ValueError, match="not UTF-8 at byte 2: "):
        everything(write(tmp_path / "bad.txt", b"ab\xe2\x80"))


def test_holds_out_documents_where_there_are_enough(tmp_path):
    lines = [f"line {i}" for i in range(2 * SHARE + 5)]
    corpus = TextFiles(write(tmp_path / "a.txt", "\n".join(lines)), document="line")
    assert texts(corpus, "validation") == ["line 9", "line 29"]
    assert texts(corpus, "test") == ["line 19", "line 39"]
    assert texts(corpus) == [line for i, line in enumerate(lines) if i not in (9, 19, 29, 39)]


def test_holds_out_the_tail_of_a_single_text(tmp_path):
    lines = [f"this is line {i:04d}" for i in range(1000)]
    corpus = TextFiles(write(tmp_path / "a.txt", "\n".join(lines)))
    parts = [texts(corpus, split) for split in ("train", "validation", "test")]
    assert all(len(part) == 1 for part in parts)
    assert "\n".join(part[0] for part in parts).split("\n") == lines  # cut at line ends, nothing lost, in order
    assert [len(part[0]) for part in parts] == pytest.approx([900 * 18, 50 * 18, 50 * 18], abs=40)


def test_holds_out_only_what_has_no_path(tmp_path):
    lines = [f"line {i}" for i in range(SHARE)]
    main, other = write(tmp_path / "a.txt", "\n".join(lines)), write(tmp_path / "b.txt", "other")
    corpus = TextFiles(main, validation=other, document="line")
    assert texts(corpus, "validation") == ["other"]
    assert texts(corpus, "test") == ["line 19"]
    assert len(texts(corpus)) == SHARE - 1


def test_one_line_without_line_end_is_cut_at_a_space(tmp_path):
    words = " ".join(["word"] * 1000)
    corpus = TextFiles(write(tmp_path / "a.txt", words))
    parts = [texts(corpus, split)[0] for split in ("train", "validation", "test")]
    assert "".join(parts) == words
    assert all(part.split() == ["word"] * len(part.split()) for part in parts)


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match="split 'dev' is not one of train, validation, test"):
        texts(TextFiles(write(tmp_path / "a.txt", "a")), "dev")


def test_fingerprint_follows_content_not_path(tmp_path):
    one, copy, other = (write(tmp_path / f"{n}.txt", t) for n, t in (("a", "text"), ("b", "text"), ("c", "texts")))
    assert TextFiles(one).fingerprint() == TextFiles(copy).fingerprint()
    prints = {
        corpus.fingerprint()
        for corpus in (
            TextFiles(one),
            TextFiles(other),
            TextFiles(one, document="line"),
            TextFiles(one, validation=other),
            TextFiles(one, test=other),
            TextFiles(one, language="de"),
            Sotu(),
        )
    }
    assert len(prints) == 7
