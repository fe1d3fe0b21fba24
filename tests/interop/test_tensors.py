from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ctx_jax.interop.tensors import read_tensors, write_tensors

VALUES = {name: np.full((4, 5), number, np.float32) for number, name in enumerate("abcde")}


def read_all(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in read_tensors(folder).items()}


def test_shards_hold_no_more_than_asked(tmp_path: Path):
    """Five tensors of 80 bytes, at most 170 bytes a file: 2 + 2 + 1."""
    write_tensors(tmp_path, VALUES.items(), shard_bytes=170)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 400
    assert index["weight_map"] == dict(zip("abcde", [names[0]] * 2 + [names[1]] * 2 + [names[2]], strict=True))
    found = read_all(tmp_path)
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found[name], value)


def test_one_file_where_all_fits(tmp_path: Path):
    write_tensors(tmp_path, VALUES.items(), shard_bytes=400)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert read_all(tmp_path).keys() == VALUES.keys()


def test_a_transposed_array_is_written_as_it_reads(tmp_path: Path):
    value = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_tensors(tmp_path, [("x", value)], shard_bytes=100)
    np.testing.assert_array_equal(read_all(tmp_path)["x"], [[0, 3], [1, 4], [2, 5]])


def test_half_precision_is_read(tmp_path: Path):
    values = {"h": np.array([1.5, 3.0], np.float16), "b": np.array([1.5, -2.0], ml_dtypes.bfloat16)}
    save_file(values, tmp_path / "model.safetensors")
    found = read_all(tmp_path)
    np.testing.assert_array_equal(found["h"].astype(np.float32), [1.5, 3.0])
    np.testing.assert_array_equal(found["b"].astype(np.float32), [1.5, -2.0])


def test_a_folder_without_tensors_says_what_it_needs(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no tensors in .*: it needs model.safetensors or pytorch_model.bin"):
        read_tensors(tmp_path)


def test_a_damaged_file_is_one_line(tmp_path: Path):
    write_tensors(tmp_path, VALUES.items(), shard_bytes=400)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="is not a safetensors file that can be read"):
        read_tensors(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path: Path):
    write_tensors(tmp_path, VALUES.items(), shard_bytes=170)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]

    def told(changed: object) -> str:
        path.write_text(json.dumps(changed))
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            read_tensors(tmp_path)
        return str(error.value)

    assert "is missing, and model.safetensors.index.json names it" in told(
        {"weight_map": {**places, "f": "g.safetensors"}}
    )
    assert "is not a file beside it" in told({"weight_map": {**places, "a": "../a.safetensors"}})
    assert "lacks the tensor f, which" in told({"weight_map": {**places, "f": places["a"]}})
    assert "does not place the tensors b, which" in told({"weight_map": {k: v for k, v in places.items() if k != "b"}})
    assert "it needs a weight_map" in told([1])
