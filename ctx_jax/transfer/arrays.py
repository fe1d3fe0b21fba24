"""Arrays that are written while they grow, and end in an .npz or .safetensors file: in little memory, whole or not at
all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ctx_jax.data import share

SUFFIXES = (".npz", ".safetensors")


def check_output(output: Path) -> None:
    """Raises ValueError if the file is there already or of no kind that is written here."""
    if output.suffix not in SUFFIXES:
        raise ValueError(f"--output {output} is of no known kind: end its name in {' or '.join(SUFFIXES)}")
    if output.exists():
        raise ValueError(f"{output} is there already: choose another --output")


class Vectors:
    """[N, D] fp32 in a file, of any N, whose rows are written in any order."""

    def __init__(self, file: BinaryIO, width: int) -> None:
        """
        Args:
            file: open for reading and writing, and empty.
            width: D.
        """
        self._file, self._width, self._count = file, width, 0

    def write(self, place: int, vectors: np.ndarray) -> None:
        """Puts [n, D] into the rows from `place` on."""
        self._file.seek(place * self._width * 4)
        self._file.write(np.ascontiguousarray(vectors, np.float32).data)
        self._count = max(self._count, place + len(vectors))

    def array(self) -> np.ndarray:
        """All of them, read from the file where they are used."""
        self._file.flush()
        shape = (self._count, self._width)
        return np.memmap(self._file, np.float32, mode="r", shape=shape) if self._count else np.zeros(shape, np.float32)


def save(output: Path, arrays: dict[str, Any]) -> None:
    """Writes the file at once, by its suffix; arrays on disk pass through little memory."""
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        file = Path(folder) / output.name
        if output.suffix == ".npz":
            np.savez(file, **arrays)
        else:
            try:
                save_file(arrays, file)
            except SafetensorError as error:
                raise ValueError(f"{output} cannot be written: {error}") from None
            share(file)
        file.rename(output)
