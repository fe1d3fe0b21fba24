"""Reading files as text: compressed, damaged, in JSON, remote."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.data import files as module
from ctx_jax.data.corpora import TextFiles, documents
from ctx_jax.data.files import location, read, text_files

zstd = module._zstd()
BLOCK_OF_ZSTD = 1 << 17
"""Its decoder gives nothing of a block before it has seen the whole."""

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def everything(path: Path | str, **options) -> list[str]:
    """All documents of a path, nothing held out."""
    return list(documents(TextFiles(path, whole=True, **options).passages("train")))


def unified(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(["a", "\r", "\n", "\r\n", "\ufeff", "é", "\u2028", "\x85", "🙂", "\0"]), max_size=30),
    st.integers(1, 7),
    st.sampled_from(list(COMPRESS)),
)
def test_text_does_not_depend_on_blocks(tmp_path_factory, parts, block, suffix):
    text = "".join(parts)
    file = write(tmp_path_factory.getbasetemp() / f"hard.txt{suffix}", COMPRESS[suffix](text.encode()))
    with mock.patch.object(module, "BLOCK", block):
        assert "".join(read(file)) == unified(text)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40), st.integers(1, 7), st.sampled_from(["", ".gz"]))
def test_bytes_that_are_not_utf8(tmp_path_factory, data, block, suffix):
    file = write(tmp_path_factory.getbasetemp() / f"bad.txt{suffix}", COMPRESS[suffix](data))
    with mock.patch.object(module, "BLOCK", block):
        assert "".join(read(file, "replace")) == unified(data.decode("utf-8", "replace"))
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            where = " of its uncompressed text" if suffix else ""
            with pytest.raises(
                ValueError, match=rf"bad\.txt(\.gz)? is not UTF-8 at byte {error.start}{where}: convert it"
            ):
                list(read(file))
        else:
            assert "".join(read(file)) == unified(text)


def test_replacement_is_the_users_choice(tmp_path):
    file = write(tmp_path / "a.txt", b"a\xffb")
    assert everything(file, errors="replace") == ["a\ufffdb"]
    with pytest.raises(ValueError, match=r"set --data\.corpus\.errors replace"):
        everything(file)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("stem", ["a", "a.txt", "A.TXT"])
def test_compressed_text(tmp_path, stem, suffix):
    members = COMPRESS[suffix](b"\xef\xbb\xbfone\r") + COMPRESS[suffix]("\ntwo \ufeff".encode())
    write(tmp_path / f"{stem}{suffix.upper() if stem.isupper() else suffix}", members)
    assert everything(tmp_path) == ["one\ntwo \ufeff"]


def test_a_truncated_gz_says_where_its_text_ends(tmp_path):
    text = "".join(f"line {i} of the text\n" for i in range(100_000)).encode()
    whole = gzip.compress(text)
    given = io.BytesIO(whole[: len(whole) // 2])
    kept = 0
    with gzip.open(given) as stream, pytest.raises(EOFError):
        while stream.read(1):
            kept += 1
    file = write(tmp_path / "a.gz", whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=rf"a\.gz is damaged: its text breaks off at byte {kept} \(Compressed file ended"
    ):
        everything(file)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("harm", ["empty", "cut", "head", "middle", "end", "tail"])
def test_damage_is_one_line_that_names_file_and_byte(tmp_path, suffix, harm):
    text = random.Random(0).randbytes(200_000).hex().encode()  # the same each time: zstd's blocks may end elsewhere
    if suffix == ".zst":  # with a checksum, as the program zstd writes it
        whole = zstd.compress(text, options={zstd.CompressionParameter.checksum_flag: 1})
    else:
        whole = gzip.compress(text)
    at = len(whole) // 2
    damaged = {
        "empty": b"",
        "cut": whole[:-3],
        "head": b"not compressed",
        "middle": whole[:at] + bytes(64) + whole[at + 64 :],
        "end": whole[:-6] + b"\xff\xff" + whole[-4:] if suffix == ".gz" else whole[:-2] + b"\xff\xff",
        "tail": whole + b"more",
    }[harm]
    file = write(tmp_path / f"a.txt{suffix}", damaged)
    with pytest.raises(
        ValueError, match=r"a\.txt\.\w+ is damaged: its text breaks off at byte (\d+) \(.+\); copy it"
    ) as caught:
        everything(file)
    message = str(caught.value)
    assert "\n" not in message
    byte = int(message.split("byte ")[1].split(" ")[0])
    if harm in ("empty", "head"):
        assert byte == 0
    elif harm == "middle":
        assert byte >= len(text) // 2 - BLOCK_OF_ZSTD  # what was harmed may be taken for other text up to the checksum
    elif harm == "end" and suffix == ".zst":
        assert byte == len(text) // BLOCK_OF_ZSTD * BLOCK_OF_ZSTD
    else:
        assert byte == len(text)


def test_jsonl(tmp_path):
    lines = [
        '{"text": "a\\r\\nb\\rc\\n", "id": 1}',
        "",
        '{"text": " "}',
        ' {"id": 2, "text": "\\ud83d\\ude42 \\u2028 [MASK]"} ',
        '{"text": "no\\ufeff"}',
    ]
    data = "\ufeff" + "\r\n".join(lines)
    expected = ["a\nb\nc", "🙂 \u2028 [MASK]", "no\ufeff"]
    for suffix, compress in COMPRESS.items():
        file = write(tmp_path / f"a.jsonl{suffix}", compress(data.encode()))
        assert everything(file) == expected
        assert everything(file, document="blank_line") == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl line 2 is not JSON: Expecting property name"),
        ('{"text": "open', r"line 2 is not JSON: Unterminated string"),
        ("[" * 100_000, r"line 2 is not JSON: .*recursion"),
        ('{"text": ' + "1" * 5000 + "}", r"line 2 is not JSON: Exceeds the limit"),
        ('["text"]', r'line 2 is no object: each line must be like \{"text": "\.\.\."\}'),
        ('{"txt": "a", "id": 1}', r"line 2 has no field 'text'; did you mean 'txt'\? \(there are: 'txt', 'id'\)"),
        ("{}", r"line 2 has no field 'text' \(there are: none\)"),
        ('{"text": 1}', r"line 2 has a field 'text' that is no text but int: give a text, or name another with"),
        ('{"text": null}', r"line 2 has a field 'text' that is no text but NoneType"),
        ('{"text": "\\ud800"}', r"line 2: the field 'text' has half a surrogate pair .*: remove it, or set"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        everything(file)
    assert "\n" not in str(caught.value)


def test_the_field_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": 1, "body": "b"}')
    assert everything(file, field="body") == ["b"]


def test_half_a_surrogate_pair_can_be_replaced(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "a\\ud800b\\udc00\\ud83d\\ude42"}')
    assert everything(file, errors="replace") == ["a\ufffdb\ufffd🙂"]


def test_files_of_a_folder(tmp_path):
    for name in ("b.txt", "a.jsonl", "c.gz", "d/e.txt.zst", "d/f.jsonl.gz", "g.md", "h.json", "a/z.txt"):
        write(tmp_path / name, "")
    names = [str(file.relative_to(tmp_path)) for file in text_files(tmp_path)]
    assert names == ["a/z.txt", "a.jsonl", "b.txt", "c.gz", "d/e.txt.zst", "d/f.jsonl.gz"]
    assert [file.name for file in text_files(f"{tmp_path}/*.md")] == ["g.md"]
    assert [file.name for file in text_files(tmp_path / "g.md")] == ["g.md"]


def test_links_are_followed_once(tmp_path):
    write(tmp_path / "real" / "deep" / "a.txt", "a")
    write(tmp_path / "other" / "b.txt", "b")
    for name, target in (
        ("text/link", "real"),
        ("text/again", "real"),
        ("text/b.txt", "other/b.txt"),
        ("real/loop", "text"),
        ("real/self", "real"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / target)
    names = [str(file.relative_to(tmp_path)) for file in text_files(tmp_path / "text")]
    assert names == ["text/again/deep/a.txt", "text/b.txt"]
    names = [str(file.relative_to(tmp_path)) for file in text_files(tmp_path)]
    assert names == ["other/b.txt", "real/deep/a.txt", "real/loop/b.txt"]


@pytest.mark.parametrize(
    "name", ["books.tar.gz", "b.TAR.zst", "b.tar", "b.tgz", "b.zip", "b.7z", "b.txt.xz", "b.jsonl.bz2"]
)
def test_an_archive_is_no_text(tmp_path, name):
    write(tmp_path / "a.txt", "text")
    file = write(tmp_path / name, "packed")
    for path in (file, tmp_path, tmp_path / "b*"):
        with pytest.raises(ValueError, match=rf"{name} is packed in a way that is not read as text: unpack it"):
            everything(path)
    file.rename(tmp_path / "about.tar.txt")
    assert len(everything(tmp_path)) == 2


def test_a_folder_that_cannot_be_read(tmp_path):
    write(tmp_path / "a.txt", "text")

    def walk(top, onerror, followlinks):
        onerror(PermissionError(13, "Permission denied", str(top)))

    with mock.patch.object(os, "walk", walk), pytest.raises(PermissionError, match="Permission denied"):
        everything(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path):
    write(tmp_path / "a.txt", "text").chmod(0)
    tmp_path.chmod(0o755)
    code = (
        "import os; from ctx_jax.data.corpora import TextFiles\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"  # root may read everything
        "try: next(TextFiles('.').passages('train'))\n"
        "except PermissionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Permission denied: 'a.txt'" in done.stdout


def test_places_are_uris_or_paths():
    assert location("gs://bucket/a") == "gs://bucket/a"
    assert location("a/b") == location(Path("a/b")) == Path("a/b")
    with pytest.raises(ValueError, match=r"path 'gs:/bucket/a' has lost a slash: give a URI as a string"):
        location(Path("gs://bucket/a"))


@pytest.fixture
def bucket(monkeypatch):
    """An s3:// that is a dictionary in memory."""
    fsspec = pytest.importorskip("fsspec")
    from etils.epath import backend
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol = ("s3",)
        store: ClassVar = {}
        pseudo_dirs: ClassVar = [""]

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("s3://").strip("/")

    files = Bucket(skip_instance_cache=True)
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: files)
    assert fsspec
    return files


def test_remote_files(bucket, tmp_path):
    data = {"b.txt": b"b\r\nb", "deep/a.jsonl.gz": gzip.compress(b'{"text": "a"}\n'), "no.md": b"m"}
    for name, content_ in data.items():
        with bucket.open(f"s3://bucket/folder/{name}", "wb") as stream:
            stream.write(content_)
        write(tmp_path / name, content_)
    assert [str(file) for file in text_files("s3://bucket/folder")] == [
        "s3://bucket/folder/b.txt",
        "s3://bucket/folder/deep/a.jsonl.gz",
    ]
    assert everything("s3://bucket/folder") == everything(tmp_path) == ["b\nb", "a"]
    assert everything("s3://bucket/folder/*.txt") == ["b\nb"]
    assert everything("s3://bucket/folder/no.md") == ["m"]
    assert TextFiles("s3://bucket/folder").fingerprint("train") == TextFiles(tmp_path).fingerprint("train")
    assert TextFiles("s3://bucket/folder/b.txt", validation=tmp_path, test=tmp_path).size("train") == 4
    with pytest.raises(FileNotFoundError, match="no text in s3://bucket/nothing"):
        everything("s3://bucket/nothing")
    with pytest.raises(ValueError, match=r"cannot be searched by \*\*: give the folder"):
        everything("s3://bucket/**/a.txt")


def test_a_remote_place_without_its_library():
    from etils.epath import backend

    with (
        mock.patch.object(backend.fsspec_backend, "fs", side_effect=ImportError("Please install gcsfs")),
        pytest.raises(ValueError, match="gs://bucket/a cannot be read: Please install gcsfs; install gcsfs for gs://"),
    ):
        text_files("gs://bucket/a")


def test_what_lies_in_a_folder_and_is_no_text(tmp_path):
    """Hidden files, pipes, and what this program made itself."""
    for name in ("a.txt", ".hidden.txt", ".git/b.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for folder, mark in (
        ("data/tokenizer-1", "config.json"),
        ("data/train-1", "store.json"),
        ("run", "experiment.json"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / mark).write_text("{}")
        (tmp_path / folder / "vocab.txt").write_text("no")
    os.mkfifo(tmp_path / "pipe.txt")
    assert [str(file.relative_to(tmp_path)) for file in text_files(tmp_path)] == ["a.txt", "deep/c.txt"]


def test_what_is_not_there_is_said_to_be_so(tmp_path):
    for name, whole_json in (("one.json", True), ("one.txt", False), ("folder", False)):
        with pytest.raises(
            FileNotFoundError, match=rf"no text in .*{name} \(there is no such file or folder\): give a text file"
        ):
            text_files(tmp_path / name, whole_json)
    for path in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(FileNotFoundError, match=r"no text in \S*: give a text file"):
            text_files(path)


def test_what_is_not_read_as_text(tmp_path):
    (tmp_path / "one.json").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"one\.json is JSON, not lines of it: write one object a line"):
        text_files(tmp_path / "one.json")
    for uri in ("http://a/b.txt", "file:///a.txt"):
        with pytest.raises(ValueError, match=f"{uri} cannot be read: give a local path without"):
            text_files(uri)
