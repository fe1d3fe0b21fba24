"""Hashes of files, kept between processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ctx_jax.data import hashes as module
from ctx_jax.data.files import content
from ctx_jax.data.hashes import cache, hashes, telling

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def fresh() -> None:
    """As a new process."""
    module._known.clear()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of its own, for any file, however small and new."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WORTH", 0)
    monkeypatch.setattr(module, "SETTLED", -(10**12))
    monkeypatch.setattr(module, "_known", {})
    assert cache() == tmp_path / "cache" / "ctx_jax" / "hashes.json"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def unreadable(*_):
    raise AssertionError("a file was hashed again")


def test_content_is_hashed_once_and_anew_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WORTH", 1 << 40)
    file = write(tmp_path / "a.txt", "text")
    first = content([file])
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read", unreadable)
        assert content([file]) == first
    write(file, "txet")
    os.utime(file, ns=(1, 1))
    assert content([file]) != first
    same = write(tmp_path / "a.jsonl", "txet")
    assert content([file]) != content([same])  # the same bytes, another text
    assert not cache().exists()


def test_another_process_finds_what_was_hashed(tmp_path, monkeypatch):
    files = [write(tmp_path / f"{name}.txt", name * 10) for name in "ab"] + [write(tmp_path / "empty.txt", "")]
    found = hashes(files)
    assert found[2] == EMPTY
    fresh()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read", unreadable)
        assert hashes(files[::-1]) == found[::-1]
    fresh()
    before = files[0].stat()
    write(files[0], "b" * 10)
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))  # a copy that keeps the time
    assert hashes(files[:2]) == [found[1], found[1]]
    fresh()
    monkeypatch.setattr(module, "_read", unreadable)
    assert hashes(files[:2]) == [found[1], found[1]]
    assert len(json.loads(cache().read_bytes())) == 3  # of each file the latest


def test_few_bytes_and_new_files_are_not_kept(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(module, "WORTH", module.OPENING + 5)
    hashes([file])
    assert not cache().exists()
    fresh()
    monkeypatch.setattr(module, "WORTH", 0)
    monkeypatch.setattr(module, "SETTLED", 10**12)
    hashes([file])
    assert json.loads(cache().read_bytes()) == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '[["a"]]', '[["a", "b", 1, "c"]]', '{"a": 1}', "null", "\xff"])
def test_damage_costs_only_time(tmp_path, damage):
    file = write(tmp_path / "a.txt", "text")
    cache().parent.mkdir(parents=True)
    cache().write_bytes(damage.encode("latin-1"))
    found = hashes([file])
    assert [entry[3] for entry in json.loads(cache().read_bytes())] == found


def test_without_a_home(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "text")
    found = hashes([file])
    for place in ("/dev/null", "/proc/nothing"):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        fresh()
        assert hashes([file]) == found
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    fresh()
    assert hashes([file]) == found


def test_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for name in "abcde":
        hashes([write(tmp_path / name, name)])
    assert [Path(name).name for name, *_ in json.loads(cache().read_bytes())] == ["c", "d", "e"]
    assert [path.name for path in cache().parent.iterdir()] == ["hashes.json"]


def test_long_hashing_is_told(tmp_path, monkeypatch):
    files = [write(tmp_path / name, name * 30) for name in "abc"]
    told = []
    with telling(lambda *done: told.append(done)):
        hashes(files)
    assert told == []
    fresh()
    cache().unlink()
    monkeypatch.setattr(module, "SLOW", 0.0)
    monkeypatch.setattr(module, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(module, "BLOCK", 10)
    with telling(lambda *done: told.append(done)):
        hashes(files)
    assert told[0] == (0, 10)
    assert told[-1] == (3, 90)
    fresh()
    cache().unlink()
    hashes(files)
    assert told[-2:] == [(2, 90), (3, 90)]


def test_a_time_that_is_unknown_is_not_kept(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(module, "size_and_time", lambda file: (4, 0))
    hashes([file])
    assert json.loads(cache().read_bytes()) == []
