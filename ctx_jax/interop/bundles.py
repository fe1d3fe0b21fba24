"""TensorFlow's checkpoints, read without TensorFlow.

A checkpoint `model.ckpt` is an index, `model.ckpt.index`, and shards, `model.ckpt.data-00000-of-00001`, which are
nothing but the tensors' bytes. The index is a table as in LevelDB: sorted keys in blocks, each key stored as what it
does not share with the one before, an index block of the blocks' last keys, and a footer that says where that is. The
empty key has the header, every other is a tensor's name, with where its bytes are (protocol buffers BundleHeaderProto
and BundleEntryProto). Blocks and tensors carry a CRC-32C, which is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ctx_jax.interop.checksums import crc32c, masked
from ctx_jax.interop.pickles import Lazy

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
"""Bytes of a table's end."""
DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
"""TensorFlow's numbers of the types whose bytes are an array."""
STRING = 7
"""The type that is left out."""


class Damaged(Exception):
    """What is wrong, and where."""


class Refused(Exception):
    """What is not read, and where."""


class Entry(NamedTuple):
    """Where a tensor is."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int


def read_checkpoint(folder: Path) -> dict[str, Lazy]:
    """{name: tensor} of the one checkpoint in a folder; nothing but names and shapes is read yet. Strings are left out:
    no weight is one (TensorFlow 2 describes its objects so).

    Raises FileNotFoundError if there is none or a shard is missing, ValueError if there are several, or if the index or
    a shard is damaged or cut short.
    """
    indices = sorted(folder.glob("*.index"))
    if not indices:
        raise FileNotFoundError(f"no checkpoint in {folder}: it needs a .ckpt.index and its .ckpt.data-00000-of-00001")
    if len(indices) > 1:
        names = ", ".join(path.name for path in indices)
        raise ValueError(f"{folder} holds several checkpoints ({names}): move all but one elsewhere")
    (index,) = indices
    try:
        entries, shards = read_index(index.read_bytes())
    except Damaged as error:
        raise ValueError(f"{index} is damaged ({error}): fetch it again") from None
    except Refused as error:
        raise ValueError(
            f"{index} is of a form that is not read ({error}): save it again as TensorFlow does by default "
            "(tf.train.Saver), variables whole"
        ) from None
    paths = [index.with_suffix(f".data-{number:05}-of-{shards:05}") for number in range(shards)]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, and {index.name} names it: fetch it too")
    sizes = [path.stat().st_size for path in paths]
    for name, entry in entries.items():
        path, end = paths[entry.shard], entry.offset + entry.size
        if end > sizes[entry.shard]:
            raise ValueError(
                f"{path} ends at byte {sizes[entry.shard]}, and {name} goes to byte {end}: it was cut short, fetch it "
                "again"
            )
    return {
        name: Lazy(entry.shape, partial(read_tensor, paths[entry.shard], name, entry))
        for name, entry in entries.items()
        if entry.dtype in DTYPES
    }


def read_tensor(path: Path, name: str, entry: Entry) -> np.ndarray:
    """A tensor's values; raises ValueError if its bytes are not those that were written."""
    with path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.size)
    if len(data) != entry.size or masked(crc32c(data)) != entry.checksum:
        raise ValueError(f"{path} is damaged at {name}, byte {entry.offset} (checksum): fetch it again")
    return np.frombuffer(data, element(entry.dtype)).reshape(entry.shape)


def element(dtype: int) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if DTYPES[dtype] == "bfloat16" else DTYPES[dtype]).newbyteorder("<")


def read_index(table: bytes) -> tuple[dict[str, Entry], int]:
    """The tensors of an index and the number of shards; raises Damaged or Refused."""
    entries: dict[str, Entry] = {}
    shards = 0
    for key, value in read_table(table):
        if not key:
            header = message(value, "the header")
            shards = number(header, 1, "the header")
            if number(header, 2, "the header"):
                raise Refused("written on a big-endian machine")
            continue
        name = key.decode(errors="replace")
        entries[name] = read_entry(name, value)
    if not shards:
        raise Damaged("the header is missing or names no shard")
    for name, entry in entries.items():
        if entry.shard >= shards:
            raise Damaged(f"{name} is in shard {entry.shard} of {shards}")
    return entries, shards


def read_entry(name: str, value: bytes) -> Entry:
    """One BundleEntryProto."""
    fields = message(value, name)
    if 7 in fields:
        raise Refused(f"{name} is kept in slices, as a partitioned variable")
    dtype, offset, size = (number(fields, field, name) for field in (1, 4, 5))
    dimensions = repeated(message(b"".join(repeated(fields, 2, name)), name), 2, name)
    shape = tuple(number(message(dimension, name), 1, name) for dimension in dimensions)
    if dtype not in DTYPES and dtype != STRING:
        raise Refused(f"{name} is of type {dtype} of DataType")
    if dtype in DTYPES and size != element(dtype).itemsize * math.prod(shape):
        raise Damaged(f"{name} has shape {shape} and {size} bytes")
    return Entry(dtype, shape, number(fields, 3, name), offset, size, number(fields, 6, name))


def read_table(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of a table in order."""
    if len(table) < FOOTER or int.from_bytes(table[-8:], "little") != MAGIC:
        raise Damaged(f"no table ends at byte {len(table)}")
    place = f"the footer at byte {len(table) - FOOTER}"
    footer = table[-FOOTER:]
    *_, at = handle(footer, 0, place)  # of other information, of which there is none
    start, size, _ = handle(footer, at, place)
    for _, value in read_block(table, start, size):
        start, size, _ = handle(value, 0, "the index block")
        yield from read_block(table, start, size)


def handle(data: bytes, at: int, place: str) -> tuple[int, int, int]:
    """(start, size) of a block, and where its handle ends."""
    start, at = varint(data, at, place)
    size, at = varint(data, at, place)
    return start, size, at


def read_block(table: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of a block."""
    place = f"the block at byte {start}"
    end = start + size + 1
    if end + 4 > len(table) - FOOTER or size < 4:
        raise Damaged(f"{place} goes on beyond the blocks' end")
    if masked(crc32c(table[start:end])) != int.from_bytes(table[end : end + 4], "little"):
        raise Damaged(f"{place} has another checksum")
    if table[end - 1]:
        raise Refused(f"{place} is compressed, of kind {table[end - 1]}; 1 is Snappy")
    block = table[start : start + size]
    stop = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # before the places where a key is whole
    at, key = 0, b""
    while at < stop:
        shared, at = varint(block, at, place)
        fresh, at = varint(block, at, place)
        length, at = varint(block, at, place)
        if shared > len(key) or at + fresh + length > stop:
            raise Damaged(f"{place} has an entry that goes on beyond its end")
        key = key[:shared] + block[at : at + fresh]
        yield key, block[at + fresh : at + fresh + length]
        at += fresh + length


def varint(data: bytes, at: int, place: str) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise Damaged(f"{place} has a number without an end")


def message(data: bytes, place: str) -> dict[int, list[int | bytes]]:
    """The fields of a protocol buffer by number."""
    fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = varint(data, at, place)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = varint(data, at, place)
        else:
            size, at = varint(data, at, place) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(data) + 1), at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise Damaged(f"{place} has a field that goes on beyond its end")
            value = value if kind == 2 else int.from_bytes(value, "little")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def number(fields: dict[int, list[int | bytes]], field: int, place: str) -> int:
    """A field's number, 0 where it is not said."""
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int) or value >= 1 << 63:
        raise Damaged(f"{place} has no number of 0 or more in field {field}")
    return value


def repeated(fields: dict[int, list[int | bytes]], field: int, place: str) -> list[bytes]:
    """A repeated field's bytes."""
    values = fields.get(field, [])
    for value in values:
        if not isinstance(value, bytes):
            raise Damaged(f"{place} has a number in field {field}")
    return [value for value in values if isinstance(value, bytes)]
