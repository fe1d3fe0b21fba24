from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctx_jax.interop.pickles import OLD_MAGIC, Storage, Stored, read_state_dict, rebuild, view
from ctx_jax.interop.tensors import read_tensors
from tests.golden.compare import HERE

ZIPPED = HERE / "gpt2_erf" / "pytorch_model.bin"
OLD = HERE / "gpt_relu" / "pytorch_model.bin"


def with_pickle(path: Path, change: Any) -> Path:
    """A copy of the zipped file whose pickle is `change(pickle)`."""
    with zipfile.ZipFile(ZIPPED) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return path


def message(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_state_dict(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


class Harmful:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, ("touch harmed",)


@pytest.mark.parametrize("harm", [os.system, eval, getattr, Path, np.dtype])
def test_a_pickle_that_calls_anything_is_refused_before_it_is_called(
    harm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    path = with_pickle(tmp_path / "pytorch_model.bin", lambda data: pickle.dumps({"a": Harmful(harm)}, protocol=2))
    told = message(path)
    assert harm.__name__ in told and "torch.save(model.state_dict(), 'pytorch_model.bin')" in told
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("path", [ZIPPED, OLD])
def test_a_pickled_module_is_refused_by_name(path: Path, tmp_path: Path):
    old, new = b"torch._utils\n_rebuild_tensor_v2", b"mem_transformer\nMemTransformerL"
    target = tmp_path / "pytorch_model.bin"
    if path is OLD:
        data = path.read_bytes()
        assert old in data
        target.write_bytes(data.replace(old, new))
    else:
        with_pickle(target, lambda data: data.replace(old, new))
    assert "holds a pickled mem_transformer.MemTransformerL, and reading that could run any code" in message(target)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"model": {"a": 1}, "step": 3}, "entry 'model' is a dict and no tensor"),
        ({"step": 3}, "entry 'step' is a int and no tensor"),
        ([1, 2], "holds a list and no state_dict"),
        ({3: 4}, "entry 3 is a int and no tensor"),
    ],
)
def test_what_is_no_state_dict_is_named(value: Any, told: str, tmp_path: Path):
    path = with_pickle(tmp_path / "x.bin", lambda data: pickle.dumps(value, protocol=2))
    assert told in message(path) and "save model.state_dict() alone" in message(path)


@pytest.mark.parametrize("size", [0, 1, 50, 300, 900])
@pytest.mark.parametrize("source", [ZIPPED, OLD])
def test_a_truncated_file_is_one_line(source: Path, size: int, tmp_path: Path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(source.read_bytes()[:size])
    assert "is not a state_dict that can be read" in message(path)


def test_every_damaged_byte_of_the_pickle_is_a_value_error_or_read(tmp_path: Path):
    rng = np.random.default_rng(0)
    for _ in range(60):

        def damage(data: bytes) -> bytes:
            changed = bytearray(data)
            changed[rng.integers(len(data))] = rng.integers(256)
            return bytes(changed)

        path = with_pickle(tmp_path / "x.bin", damage)
        try:
            for tensor in read_state_dict(path).values():
                assert isinstance(tensor.shape, tuple)
        except ValueError as error:
            assert "\n" not in str(error)


def test_a_view_of_a_storage_by_strides():
    data = np.arange(6, dtype="<f4")
    storage = Storage("float32", "0", 6)
    transposed = rebuild(storage, 1, (2, 2), (1, 3), False, OrderedDict())
    np.testing.assert_array_equal(view(transposed, lambda s: data.tobytes()), [[1.0, 4.0], [2.0, 5.0]])
    scalar = rebuild(storage, 5, (), (), False, OrderedDict())
    assert view(scalar, lambda s: data.tobytes()) == 5.0


def test_bfloat16_is_the_upper_half_of_fp32():
    stored = Stored(Storage("bfloat16", "0", 2), 0, (2,), (1,))
    found = view(stored, lambda s: struct.pack("<HH", 0x3FC0, 0xC000))
    np.testing.assert_array_equal(found.astype(np.float32), [1.5, -2.0])


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (7,), (1,)), (5, (2,), (1,)), (0, (2, 2), (4, 2)), (-1, (1,), (1,)), (0, (2,), (-1,))],
)
def test_a_tensor_beyond_its_storage_is_refused(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]):
    with pytest.raises(pickle.UnpicklingError, match="reaches beyond its storage"):
        rebuild(Storage("float32", "0", 6), offset, shape, strides)


def test_both_formats_hold_the_same(tmp_path: Path):
    """The old format, written by hand: magic number, version, system, object, keys, and size and bytes of each."""
    values = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([7, 8], "<i8")}
    names = {"a": ("FloatStorage", 6, "(2, 3)"), "b": ("LongStorage", 2, "(2,)")}

    def tensor(key: str) -> bytes:
        kind, size, _ = names[key]
        shape = values[key].shape
        strides = tuple(step // values[key].itemsize for step in values[key].strides)
        parts = [b"ctorch._utils\n_rebuild_tensor_v2\n", b"((Vstorage\n", f"ctorch\n{kind}\n".encode()]
        parts += [f"V{key}\nVcpu\nI{size}\nNtQI0\n(".encode(), *(f"I{n}\n".encode() for n in shape), b"t("]
        return b"".join([*parts, *(f"I{n}\n".encode() for n in strides), b"tI00\nccollections\nOrderedDict\n)RtR"])

    state = b"".join([b"(d", *(f"V{key}\n".encode() + tensor(key) + b"s" for key in values), b"."])
    stream = io.BytesIO()
    for value in (OLD_MAGIC, 1001, {"little_endian": True}):
        stream.write(pickle.dumps(value, protocol=2))
    stream.write(state)
    stream.write(pickle.dumps(list(values), protocol=2))
    for value in values.values():
        stream.write(struct.pack("<q", value.size) + value.tobytes())
    (tmp_path / "pytorch_model.bin").write_bytes(stream.getvalue())
    found = read_tensors(tmp_path)
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert found[key].shape == value.shape
        np.testing.assert_array_equal(found[key].read(), value)


def test_a_file_that_is_missing_stays_a_file_error(tmp_path: Path):
    shutil.copy(ZIPPED, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError):
        read_state_dict(tmp_path / "other.bin")
