"""What the files of a folder held when they were written: `checksums.sha256`, in the format of `sha256sum`.

`sha256sum --check checksums.sha256`, run in the folder, says the same as `damage`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ctx_jax.data import settle

FILE = "checksums.sha256"

LINE = re.compile(r"([0-9a-f]{64})  (.+)")

THREADS = 8
"""Files that are read at a time; hashing leaves the interpreter to others."""


def write(folder: Path) -> None:
    """Hashes every file of the folder, and writes the list into it; all of it is on disk when it returns."""
    names = files(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(lambda name: hashed(folder / name, durably=True), names)
        text = "".join(f"{digest}  {name}\n" for digest, name in zip(hashes, names, strict=True))
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            settle(path)


def damage(folder: Path, part: int = 0, parts: int = 1) -> tuple[int, str] | None:
    """The first file of the folder that is not what `write` saw, by its number and what is wrong with it; None if all
    are as they were.

    Args:
        part: of the files, only every `parts`-th is read, from this one on; `parts` processes read them all.
    """
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0, f"has no {FILE}"
    except (OSError, UnicodeDecodeError):
        text = ""
    lines = [LINE.fullmatch(line) for line in text.split("\n")[:-1]]
    expected = {line[2]: line[1] for line in lines if line}
    if not lines or None in lines or not text.endswith("\n") or sorted(expected) != list(expected):
        return 0, f"{FILE} is not readable"
    names = files(folder)
    if strange := sorted(set(names) ^ set(expected)):
        return 0, f"{strange[0]} is {'missing' if strange[0] in expected else f'not in {FILE}'}"
    mine = list(enumerate(names))[part::parts]
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(lambda item: hashed(folder / item[1]), mine)
        for (number, name), digest in zip(mine, hashes, strict=True):
            if digest != expected[name]:
                return number, f"{name} does not hold what was written"
    return None


def files(folder: Path) -> Sequence[str]:
    """The names of all files in the folder, at any depth, but the list itself; sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILE)


def hashed(file: Path, durably: bool = False) -> str:
    """The SHA-256 of a file, or why it cannot be read."""
    try:
        with file.open("rb") as stream:
            if durably:
                os.fsync(stream.fileno())
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        if durably:
            raise
        return str(error)
