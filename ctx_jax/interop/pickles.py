"""PyTorch's pickled state_dicts, read without PyTorch by an unpickler that runs nothing.

A pickle may name any function of any module and call it. This reader knows ordered dictionaries, tensors and their
storages; whatever else a file names is refused before it is looked up.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
OLD_MAGIC = 0x1950A86A20F9469CFC6C
"""First number of a file in the format before PyTorch 1.6, which is no zip archive."""


class Lazy(NamedTuple):
    """A tensor that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Storage(NamedTuple):
    """What a persistent id of the pickle means: bytes that are kept elsewhere in the file."""

    dtype: str
    key: str
    size: int


class Stored(NamedTuple):
    """A tensor as a view of a storage; offset and strides count elements. Immutable, and without methods of its own, so
    that a pickle cannot do anything to it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Stored:
    """`torch._utils._rebuild_tensor_v2`; what follows (gradients, hooks) is of no interest."""
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or len(shape) != len(strides) or not all(isinstance(n, int) for n in numbers):
        raise pickle.UnpicklingError("a tensor without a storage")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if min(numbers) < 0 or (0 not in shape and last >= storage.size):
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    return Stored(storage, offset, tuple(shape), tuple(strides))


def rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


ADMITTED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild,
    ("torch._utils", "_rebuild_tensor"): rebuild,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


class Refused(pickle.UnpicklingError):
    """The pickle names something that is not admitted; the argument is its name."""


class Reader(pickle.Unpickler):
    """Admits what a state_dict is made of."""

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any, /) -> Storage:
        kind, dtype, key, _, size, *view = pid
        if kind != "storage" or dtype not in STORAGES.values() or any(view) or not isinstance(size, int):
            raise pickle.UnpicklingError(f"an unknown reference {str(pid)[:60]}")
        return Storage(dtype, str(key), size)


def element(storage: Storage) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if storage.dtype == "bfloat16" else storage.dtype).newbyteorder("<")


def view(stored: Stored, read: Callable[[Storage], bytes]) -> np.ndarray:
    """The tensor's values; `read` gives the bytes of a storage."""
    data = np.frombuffer(read(stored.storage), element(stored.storage), stored.storage.size)[stored.offset :]
    strides = [step * data.itemsize for step in stored.strides]
    return np.lib.stride_tricks.as_strided(data, stored.shape, strides, writeable=False)


def read_state_dict(path: Path) -> dict[str, Lazy]:
    """{name: tensor} of a file that `torch.save(model.state_dict(), path)` wrote.

    Raises ValueError if it holds anything else than tensors by name, or is damaged.
    """
    try:
        zipped = zipfile.is_zipfile(path)
        state, read = read_zipped(path) if zipped else read_old(path)
    except Refused as error:
        raise ValueError(
            f"{path} holds a pickled {error}, and reading that could run any code: where its source is at hand, save "
            "the tensors alone, torch.save(model.state_dict(), 'pytorch_model.bin'), and read that"
        ) from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in every way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a state_dict that can be read ({reason}): save it again") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__} and no state_dict: save model.state_dict() alone")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Stored):
            raise ValueError(
                f"{path}: entry {name!r} is a {type(value).__name__} and no tensor: save model.state_dict() alone"
            )
    return {name: Lazy(stored.shape, partial(view, stored, read)) for name, stored in state.items()}


class Empty:
    """Stands for any object of a pickle; whatever the pickle does with it, nothing happens."""

    def __new__(cls, *_: Any, **__: Any) -> Empty:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


class PlainReader(Reader):
    """Reads numbers, strings, lists and dictionaries; `Empty` takes the place of every other object."""

    def find_class(self, module: str, name: str, /) -> Any:
        return ADMITTED.get((module, name), Empty)


def read_dictionary(path: Path) -> dict[str, Any]:
    """The dictionary in a file that pickle or PyTorch wrote, as far as it is plain (`PlainReader`).

    Raises ValueError if there is none, or if the file is damaged.
    """
    try:
        if zipfile.is_zipfile(path):
            found, _ = read_zipped(path, PlainReader)
        else:
            with path.open("rb") as file:
                found = PlainReader(file).load()
                if found == OLD_MAGIC:
                    found, _ = read_old(path, PlainReader)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in every way
        raise ValueError(f"{path} is not a pickle that can be read ({type(error).__name__}): fetch it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no dictionary")
    return found


def read_zipped(path: Path, reader: type[Reader] = Reader) -> tuple[Any, Callable[[Storage], bytes]]:
    """The object in a file of PyTorch 1.6 or later, and what reads its storages."""
    with zipfile.ZipFile(path) as archive:
        pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise pickle.UnpicklingError("no data.pkl in the archive")
        folder = pickled[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise pickle.UnpicklingError("written on a big-endian machine")
        with archive.open(pickled[0]) as file:
            state = reader(file).load()

    def read(storage: Storage) -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{folder}data/{storage.key}")

    return state, read


def read_old(path: Path, reader: type[Reader] = Reader) -> tuple[Any, Callable[[Storage], bytes]]:
    """The same of the format before: pickles of magic number, version, system, object and keys, then the storages."""
    sizes: dict[str, int] = {}

    class Sized(reader):
        def persistent_load(self, pid: Any, /) -> Storage:
            storage = super().persistent_load(pid)
            sizes[storage.key] = storage.size * element(storage).itemsize
            return storage

    with path.open("rb") as file:
        if Reader(file).load() != OLD_MAGIC:
            raise pickle.UnpicklingError("no file of torch.save")
        for _ in ("version", "system"):
            Reader(file).load()
        state = Sized(file).load()
        places = {}
        for key in Reader(file).load():
            file.seek(8, 1)  # the number of elements, which the pickle has told
            places[key] = file.tell()
            file.seek(sizes[key], 1)

    def read(storage: Storage) -> bytes:
        with path.open("rb") as file:
            return exactly(file, places[storage.key], storage.size * element(storage).itemsize)

    return state, read


def exactly(file: IO[bytes], start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)
