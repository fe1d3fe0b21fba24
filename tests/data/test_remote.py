from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from etils.epath import backend

from ctx_jax.data.remote import fetch, is_remote, publish

REMOTE = "gs://bucket/data/train-1"
CONTENT = {"offsets.bin": b"12345678", "store.json": b"{}", "tokens.bin": bytes(range(256)) * 9000}


@pytest.fixture
def finished(tmp_path):
    folder = tmp_path / "train-1"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_there_and_back(bucket, finished, tmp_path):
    assert not fetch(REMOTE, tmp_path / "copy")
    publish(finished, REMOTE)
    assert sorted(bucket.written[:2]) == ["offsets.bin", "tokens.bin"]
    assert bucket.written[2:] == ["store.json"]
    assert fetch(REMOTE, tmp_path / "copy")
    assert content(tmp_path / "copy") == CONTENT


def test_what_is_there_is_kept(bucket, finished, tmp_path):
    publish(finished, REMOTE)
    publish(finished, REMOTE)
    assert len(bucket.written) == 3
    with mock.patch.object(bucket, "open", side_effect=AssertionError):
        assert fetch(REMOTE, finished)


@pytest.mark.parametrize("broken", CONTENT)
def test_an_interrupted_publication_is_not_finished(bucket, finished, tmp_path, broken):
    whole = type(bucket).open

    def fail(self, path, mode="rb", **options):
        if path.endswith(broken) and "w" in mode:
            raise KeyboardInterrupt
        return whole(self, path, mode, **options)

    with mock.patch.object(type(bucket), "open", fail), pytest.raises(KeyboardInterrupt):
        publish(finished, REMOTE)
    assert not fetch(REMOTE, tmp_path / "copy")
    publish(finished, REMOTE)
    assert fetch(REMOTE, tmp_path / "copy")
    assert content(tmp_path / "copy") == CONTENT


def test_a_failed_copy_leaves_nothing(bucket, finished, tmp_path):
    publish(finished, REMOTE)
    bucket.rm_file(f"{REMOTE}/tokens.bin")
    listed = bucket.ls(REMOTE, detail=False)
    with (
        mock.patch.object(type(bucket), "listdir", lambda *_, **__: [*listed, "/bucket/data/train-1/tokens.bin"]),
        pytest.raises(FileNotFoundError),
    ):
        fetch(REMOTE, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["train-1"]


def test_errors(finished, tmp_path):
    with (
        mock.patch.object(backend.fsspec_backend, "fs", side_effect=ImportError("Please install gcsfs")),
        pytest.raises(ValueError, match=f"{REMOTE} cannot be reached: Please install gcsfs; install gcsfs for gs://"),
    ):
        fetch(REMOTE, tmp_path / "copy")
    with pytest.raises(ValueError, match="http://a/b cannot be reached: choose a place of gs://, s3://"):
        fetch("http://a/b", tmp_path / "copy")
    (finished / "store.json").unlink()
    with pytest.raises(FileNotFoundError, match="train-1 holds no finished store or tokenizer: prepare it first"):
        publish(finished, REMOTE)


def test_what_is_remote():
    assert is_remote("gs://bucket/data")
    assert is_remote("s3://bucket")
    assert not is_remote("data")
    assert not is_remote(Path("/data"))
    with pytest.raises(ValueError, match="has lost a slash"):
        is_remote(Path("gs://bucket/data"))
