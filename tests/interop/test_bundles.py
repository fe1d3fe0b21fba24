"""TensorFlow's checkpoints: those that TensorFlow wrote, and tables written here by the format's description."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ctx_jax.interop.bundles import read_checkpoint
from ctx_jax.interop.checksums import crc32c, masked
from tests.golden.pretraining import HERE

FLOAT, STRING, INT64, BFLOAT16, COMPLEX = 1, 7, 9, 14, 8


def naive(data: bytes) -> int:
    """CRC-32C bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def stored(data: bytes) -> bytes:
    crc = naive(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def varint(value: int) -> bytes:
    more = value >> 7
    return bytes([value & 127 | (128 if more else 0)]) + (varint(more) if more else b"")


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry(dtype: int, shape: tuple[int, ...], shard: int, offset: int, data: bytes, more: bytes = b"") -> bytes:
    dims = b"".join(field(2, field(1, size)) for size in shape)
    place = field(3, shard) + field(4, offset) + field(5, len(data))
    return field(1, dtype) + field(2, dims) + place + varint(6 << 3 | 5) + stored(data) + more


def block(pairs: list[tuple[bytes, bytes]], restart: int) -> bytes:
    """Keys as what they do not share with the one before, whole at every `restart`-th."""
    out, before, restarts = b"", b"", []
    for number, (key, value) in enumerate(pairs):
        shared = 0
        if number % restart == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(pairs: dict[str, bytes], size: int = 3, kind: int = 0) -> bytes:
    """Blocks of `size` entries; `kind` is what the first says of its compression."""
    items = sorted((name.encode(), value) for name, value in pairs.items())
    out, index = b"", []
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    place = b""
    for part in [*parts, index]:
        content = block(part, 2)
        place = varint(len(out)) + varint(len(content))
        if part is not index:
            index.append((part[-1][0], place))
        content += bytes([kind if part is parts[0] else 0])
        out += content + stored(content)
    footer = varint(0) + varint(0) + place
    return out + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def write(
    folder: Path, entries: dict[str, bytes], shards: list[bytes], header: bytes | None = None, **options: Any
) -> Path:
    header = field(1, len(shards)) if header is None else header
    (folder / "model.ckpt.index").write_bytes(table({"": header, **entries}, **options))
    for number, data in enumerate(shards):
        (folder / f"model.ckpt.data-{number:05}-of-{len(shards):05}").write_bytes(data)
    return folder


def message(folder: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        for tensor in read_checkpoint(folder).values():
            tensor.read()
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def test_the_checksum_is_that_of_the_standard():
    """RFC 3720, appendix B.4, and bit by bit for lengths around every number of lanes."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(b"") == 0
    data = random.Random(0).randbytes(5000)
    for size in (*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 5000):
        assert crc32c(data[:size]) == naive(data[:size]), size
    assert struct.pack("<I", masked(crc32c(data))) == stored(data)


def test_many_blocks_types_and_shards(tmp_path: Path):
    values = {f"layer_{number}/kernel": np.arange(number, dtype="<f4").reshape(1, -1) for number in range(20)}
    values |= {"step": np.array(300, "<i8"), "half": np.array([1.5, -2.0], ml_dtypes.bfloat16)}
    shards, entries = [b"", b"??"], {}
    for number, (name, value) in enumerate(values.items()):
        data, shard = value.tobytes(), number % 2
        dtype = {"step": INT64, "half": BFLOAT16}.get(name, FLOAT)
        entries[name] = entry(dtype, value.shape, shard, len(shards[shard]), data)
        shards[shard] += data
    entries["_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(STRING, (), 0, 0, b"graph")
    for size in (1, 3, 100):
        found = read_checkpoint(write(tmp_path, entries, shards, size=size))
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert found[name].shape == value.shape
            np.testing.assert_array_equal(found[name].read().astype(np.float32), value.astype(np.float32))


def test_what_is_not_read_is_refused(tmp_path: Path):
    data = bytes(8)
    one = {"w": entry(FLOAT, (2,), 0, 0, data)}
    assert "the block at byte 0 is compressed, of kind 1; 1 is Snappy): save it again" in message(
        write(tmp_path, one, [data], kind=1)
    )
    sliced = {"w": entry(FLOAT, (2,), 0, 0, data, field(7, b""))}
    assert "w is kept in slices, as a partitioned variable" in message(write(tmp_path, sliced, [data]))
    assert "w is of type 8" in message(write(tmp_path, {"w": entry(COMPLEX, (1,), 0, 0, data)}, [data]))
    assert "w has shape (3,) and 8 bytes" in message(write(tmp_path, {"w": entry(FLOAT, (3,), 0, 0, data)}, [data]))
    assert "w is in shard 1 of 1" in message(write(tmp_path, {"w": entry(FLOAT, (2,), 1, 0, data)}, [data]))
    big = field(1, 1) + field(2, 1)
    assert "written on a big-endian machine" in message(write(tmp_path, one, [data], header=big))
    assert "the header is missing or names no shard" in message(write(tmp_path, one, [data], header=b""))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The checkpoint of two shards that TensorFlow wrote."""
    return Path(shutil.copytree(HERE / "xlnet", tmp_path / "xlnet"))


def test_a_shard_that_is_missing_cut_short_or_damaged(copy: Path):
    shard = copy / "xlnet_model.ckpt.data-00001-of-00002"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    name = "model/transformer/word_embedding/lookup_table"
    told = message(copy)
    assert f"{shard.name} ends at byte {len(data) - 1}, and model/" in told and f"goes to byte {len(data)}" in told
    place = len(data) // 2
    shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert f"{shard.name} is damaged at model/" in message(copy) and "(checksum): fetch it again" in message(copy)
    tensors = read_checkpoint(copy)
    assert sum(damaged(tensor) for tensor in tensors.values()) == 1 and name in tensors
    shard.unlink()
    assert f"{shard} is missing, and xlnet_model.ckpt.index names it" in message(copy)


def damaged(tensor: Any) -> bool:
    try:
        tensor.read()
    except ValueError:
        return True
    return False


def test_a_damaged_index_is_one_line(copy: Path):
    """Cut anywhere, or with any byte changed: told, or read as it was."""
    index = copy / "xlnet_model.ckpt.index"
    data = index.read_bytes()
    for size in range(0, len(data), 13):
        index.write_bytes(data[:size])
        assert f"{index} is damaged (no table ends at byte {size}): fetch it again" in message(copy)
    unharmed = 0
    for place in range(0, len(data), 11):
        index.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            unharmed += len(read_checkpoint(copy)) == 33
        except ValueError as error:
            assert "\n" not in str(error) and f"{index} is damaged (" in str(error)
    assert unharmed < 10  # what the footer says of other information, or pads with


def test_a_folder_without_a_checkpoint_or_with_several(copy: Path):
    shutil.copy(copy / "xlnet_model.ckpt.index", copy / "model.ckpt-7.index")
    assert "holds several checkpoints (model.ckpt-7.index, xlnet_model.ckpt.index): move all but one" in message(copy)
    for path in copy.glob("*.index"):
        path.unlink()
    assert "no checkpoint in" in message(copy)
