"""Which bytes files hold: their hashes, kept between processes where it takes long to find them.

Hashing 100 GB takes some 4 minutes, and a remote file is read for it as a whole. So the hashes of 256 MiB or more are
kept in hashes.json in the user's cache folder ($XDG_CACHE_HOME/ctx_jax, else ~/.cache/ctx_jax), by path, size and time
of the last change. To delete it, or to have no folder that can be written, costs only the time. Files that changed
within the last seconds are not kept, for they may change again without a later time; nor are remote ones whose store
tells no time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from ctx_jax.data import TELL_SECONDS

if TYPE_CHECKING:
    from ctx_jax.data.files import File

Hook = Callable[[int, int], None]
"""Told the files and bytes that are hashed so far."""

WORTH, OPENING = 1 << 28, 1 << 14
"""Hashes of files that are together larger than this (about half a second) are kept; to open one costs as much as so
many bytes."""

MOST = 200_000
"""Hashes that are kept, the latest."""

SETTLED = 2 * 10**9
"""Nanoseconds after which a file that changes again has another time, on any file system."""

SLOW = 3.0
"""Seconds of hashing before anything is said of it."""

BLOCK = 1 << 20

_hook: ContextVar[Hook | None] = ContextVar("hook", default=None)


@contextmanager
def telling(hook: Hook) -> Iterator[None]:
    """In this block, hashing that takes more than `SLOW` seconds tells the hook, some times a second and at its end."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def size_and_time(file: File) -> tuple[int, int]:
    """Bytes, and when they were last changed (nanoseconds; 0: unknown)."""
    if isinstance(file, Path):
        about = os.stat(file)
        return about.st_size, max(about.st_mtime_ns, about.st_ctime_ns)  # copying keeps the former, nothing the latter
    about = file.stat()
    return about.length, int(about.mtime * 1e9)


_known: dict[tuple[str, int, int], str] = {}
"""What this process has hashed or looked up."""


def hashes(files: Iterable[File]) -> list[str]:
    """The SHA-256 of each file's bytes. A file that has not changed is read once, or not at all where its hash is
    kept."""
    now = time.time_ns()
    keys = [(file, (_name(file), *size_and_time(file))) for file in files]
    new = {key: file for file, key in keys if key not in _known}
    worth = sum(size + OPENING for _, size, _ in new) >= WORTH
    if worth:
        kept = _load()
        _known.update((key, kept[key]) for key in new if key in kept)
        new = {key: file for key, file in new.items() if key not in _known}
    if new:
        _known.update(zip(new, _read(new.values()), strict=True))
        if worth:
            _save({key: _known[key] for key in new if key[2] and key[2] < now - SETTLED})
    return [_known[key] for _, key in keys]


def _name(file: File) -> str:
    return os.path.join(os.getcwd(), file) if isinstance(file, Path) else str(file)


def _read(files: Iterable[File]) -> Iterator[str]:
    hook = _hook.get()
    start = told = time.monotonic()
    number = size = 0
    for number, file in enumerate(files, 1):
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                size += len(block)
                now = time.monotonic()
                if hook is not None and now - start > SLOW and now - told > TELL_SECONDS:
                    told = now
                    hook(number - 1, size)
        yield digest.hexdigest()
    if hook is not None and told > start:
        hook(number, size)


def cache() -> Path:
    """The file of hashes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctx_jax" / "hashes.json"


def _load() -> dict[tuple[str, int, int], str]:
    """What is kept; nothing if it cannot be read."""
    try:
        kept = json.loads(cache().read_bytes())
        return {(str(name), int(size), int(changed)): str(found) for name, size, changed, found in kept}
    except (OSError, RuntimeError, ValueError, TypeError):
        return {}


def _save(found: dict[tuple[str, int, int], str]) -> None:
    """Adds to what is kept, all at once: of two processes that do so together, one's may be lost."""
    with suppress(OSError, RuntimeError):  # without a home, or with one that cannot be written
        file = cache()
        file.parent.mkdir(parents=True, exist_ok=True)
        names = {name for name, _, _ in found}
        old = {key: value for key, value in _load().items() if key[0] not in names}
        entries = [[*key, value] for key, value in {**old, **found}.items()][-MOST:]
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            try:
                json.dump(entries, new, separators=(",", ":"))
                new.close()
                os.replace(new.name, file)
            except BaseException:
                os.unlink(new.name)
                raise
