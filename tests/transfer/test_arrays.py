"""Arrays that grow on disk end in files that numpy and safetensors read, or in none."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ctx_jax.transfer import arrays
from ctx_jax.transfer.arrays import SUFFIXES, Vectors, check_output, save


def load(file: Path) -> dict[str, np.ndarray]:
    return dict(np.load(file)) if file.suffix == ".npz" else load_file(file)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_vectors_are_written_in_any_order(tmp_path: Path, suffix: str):
    expected = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        vectors = Vectors(file, 3)
        for start, stop in ((5, 7), (0, 1), (2, 5), (1, 2), (3, 3)):
            vectors.write(start, expected[start:stop])
        assert list(tmp_path.iterdir()) == []
        save(tmp_path / f"a{suffix}", {"features": vectors.array(), "offsets": np.array([0, 7])})
    assert [file.name for file in tmp_path.iterdir()] == [f"a{suffix}"]
    found = load(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(found["features"], expected)
    np.testing.assert_array_equal(found["offsets"], [0, 7])
    assert (found["features"].dtype, found["offsets"].dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_vectors_have_a_width_all_the_same(tmp_path: Path, suffix: str):
    with tempfile.TemporaryFile() as file:
        save(tmp_path / f"a{suffix}", {"features": Vectors(file, 5).array()})
    assert load(tmp_path / f"a{suffix}")["features"].shape == (0, 5)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_readable_by_those_whom_the_user_lets(tmp_path: Path, suffix: str):
    before = os.umask(0o027)
    try:
        save(tmp_path / f"a{suffix}", {"features": np.zeros((1, 1), np.float32)})
    finally:
        os.umask(before)
    assert (tmp_path / f"a{suffix}").stat().st_mode & 0o777 == 0o640


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file, **found):
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrays.np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "a.npz", {"features": np.zeros((1, 1), np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_checked_before_anything_is_computed(tmp_path: Path):
    check_output(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"--output .*a.csv is of no known kind: end its name in .npz or .safetensors"):
        check_output(tmp_path / "a.csv")
    (tmp_path / "a.npz").touch()
    with pytest.raises(ValueError, match=r"a.npz is there already: choose another --output"):
        check_output(tmp_path / "a.npz")
