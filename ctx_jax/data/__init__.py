"""From text to batches, one way:

    corpora.py (documents) -> tokenizers.py -> preparation.py (by worker.py, in many processes) -> store.py (tokens on
    disk) -> readers.py, pairs.py (order) -> loader.py

Here is only what those that write share: fingerprints, and folders and files that are either whole or absent.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

TELL_SECONDS = 0.1
"""Between two calls of a function that is told of progress: each may cost as much as reading a short line."""

SHORT_OF_MEMORY = (MemoryError, ChildProcessError)
"""Errors after which what is built with `resume` goes on: they come from what else runs, not from what is built."""

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system answers that cannot do what it is asked for."""


def fingerprint(*parts: Any) -> str:
    """A key of what determines a result: equal parts (dataclasses, numbers, strings, sequences), equal key."""

    def plain(part: Any) -> Any:
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return [type(part).__name__, {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}]
        return str(part)

    return hashlib.sha256(json.dumps(parts, default=plain, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def building(folder: Path, resume: bool = False) -> Iterator[Path | None]:
    """Makes `folder` all at once: yields a temporary folder to fill, which takes the name at the end of the block, or
    None where `folder` is there already.

    A process that is killed or fails leaves nothing of that name. A second process that wants the same folder waits for
    the first and then finds it finished (the kernel drops the lock of one that dies). With `resume` the temporary
    folder of one that was killed, interrupted or `SHORT_OF_MEMORY` is yielded again, as it is; another error removes it
    even then. A folder that is there is not written to, nor anything beside it: its disk may be read-only.

    Raises OSError of what fails in the block; one that does not say where (a full disk) names `folder`.
    """
    if folder.exists():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            yield None
            return
        partial = folder.with_name(f".{folder.name}.partial")
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            partial.rename(folder)
        except BaseException as error:
            ended = not isinstance(error, Exception) or isinstance(error, SHORT_OF_MEMORY)
            if not (resume and ended):
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                reason = f"{error.strerror} (what was written is removed)"
                raise OSError(error.errno, reason, str(folder)) from None
            raise


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits until no other process has the lock of this name; the file is there only while one has it."""
    while True:
        with file.open("w") as lock:
            hold(lock)
            try:
                mine = os.path.samestat(os.fstat(lock.fileno()), file.stat())
            except FileNotFoundError:  # whoever had it has taken its file away
                mine = False
            if mine:
                try:
                    yield
                finally:
                    file.unlink(missing_ok=True)
                return


def hold(lock: IO[Any], wait: bool = True) -> None:
    """Takes the lock of an open file, which the kernel drops with the process. Where the file system has no locks, it
    says so and goes on.

    Raises BlockingIOError if it is not to wait, and another process has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        tell_of_no_locks(Path(lock.name).parent)


@cache
def tell_of_no_locks(folder: Path) -> None:
    """Once for each folder."""
    from ctx_jax.progress import tell  # which imports JAX: those that tokenize do without it

    tell(f"note: {folder} is on a file system without locks: do not give two commands for it at the same time")


def check_unchanged(before: Any, after: Any, corpus: Any) -> None:
    """Raises ValueError if keys of the corpus, from before and after it was read, differ."""
    if after != before:
        raise ValueError(f"the text changed while it was read: {corpus}; give the same command when nothing writes it")


def share(file: Path) -> None:
    """Gives a file, which a library made its owner's alone, the permissions of any new one."""
    (usual := file.with_name(f".{file.name}.usual")).touch()
    shutil.copymode(usual, file)
    usual.unlink()


def check_writable(file: Path) -> None:
    """Raises OSError, or ValueError for a folder, if the file cannot be written: before the work, not at its end."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file")
    new = next(parent for parent in file.absolute().parents if parent.exists()) / f".{file.name}.new"
    try:
        new.touch()
        new.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def write_durably(file: Path, text: str) -> None:
    """Writes or replaces a file, whole or not at all, whatever ends the process or the machine."""
    new = file.with_name(f".{file.name}.new")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    settle(file.parent)


def settle(folder: Path) -> None:
    """Waits until the names in the folder are on disk, so that one just given outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
