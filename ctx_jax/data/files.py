"""Files of text, local or remote, plain or compressed: found, and read as a stream.

What text is, is decided here alone: UTF-8, without the byte-order mark at a file's start; "\\n", "\\r\\n" and "\\r" end
a line and become "\\n", nothing else does.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import itertools
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from ctx_jax.data.hashes import hashes, size_and_time

if TYPE_CHECKING:
    from etils import epath

    File = Path | epath.Path

Errors = Literal["strict", "replace"]
"""What to do with bytes that are not UTF-8."""

BLOCK = 1 << 18
"""Bytes that are read at a time."""

TEXT = re.compile(r"\.(txt|jsonl|ndjson|gz|zst)$", re.IGNORECASE)
PACKED = re.compile(r"\.(tar(\.(gz|zst|bz2|xz|lz4|z))?|tgz|tbz2?|txz|tzst|zip|7z|rar|bz2|xz|lz4|lzma)$", re.IGNORECASE)
URI = re.compile(r"[a-z][a-z0-9]+://")
REMOTE = re.compile(r"(gs|s3|az|hf)://")
COLLAPSED_URI = re.compile(r"(gs|s3|az|hf):/[^/]")
MADE = {"store.json", "experiment.json"}
"""What tells a token store and a run; they and tokenizers are no text, though they may lie in a folder of it."""

WILDCARD = re.compile(r"[*?[]")


def location(path: str | Path) -> str | Path:
    """A URI as it is, anything else as a Path: so that equal places are equal values.

    Raises ValueError for a Path that was a URI: its "//" is lost.
    """
    if COLLAPSED_URI.match(str(path)):
        raise ValueError(f"path {str(path)!r} has lost a slash: give a URI as a string, not as a Path")
    return path if isinstance(path, str) and URI.match(path) else Path(path)


def text_files(path: str | Path, whole_json: bool = False) -> list[File]:
    """The files that a path names, in order of their names: itself, what a folder holds at any depth, or what a glob
    matches. Links are followed, but no folder is read twice. Files of JSON that are no lines of it are refused, unless
    `whole_json` asks for them.

    Raises FileNotFoundError if there is none, OSError if a folder cannot be read, ValueError if an archive (.zip, .tar
    and the like) is among them.
    """
    place = location(path)
    try:
        files = _local_files(place) if isinstance(place, Path) else _remote_files(place)
    except ImportError as error:
        raise ValueError(f"{path} cannot be read: {error}; install gcsfs for gs://, s3fs for s3://") from None
    if not files:
        lost = isinstance(place, Path) and not WILDCARD.search(str(place)) and not place.exists()
        raise FileNotFoundError(
            f"no text in {path}{' (there is no such file or folder)' if lost else ''}: give a text file, a folder that "
            "holds .txt or .jsonl files (or such as .gz or .zst), or a glob"
        )
    if not whole_json and (whole := next((file for file in files if file.name.lower().endswith(".json")), None)):
        raise ValueError(
            f"{whole} is JSON, not lines of it: write one object a line into a .jsonl file, or leave it out"
        )
    if packed := next((file for file in files if PACKED.search(file.name)), None):
        raise ValueError(
            f"{packed} is packed in a way that is not read as text: unpack it (single files may stay .gz or .zst), and "
            "move it out of the text"
        )
    return files


def _local_files(path: Path) -> list[File]:
    if path.is_file():
        return [path]
    if path.is_dir():
        names = list(_in_folder(path))
    else:
        names = [name for name in glob.iglob(str(path), recursive=True) if os.path.isfile(name)]
    return [Path(name) for name in sorted(names, key=lambda name: name.split(os.sep))]


def _in_folder(path: Path) -> Iterator[str]:
    seen: set[str] = set()
    for folder, folders, names in os.walk(path, onerror=_stop, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if MADE & set(names) or ("config.json" in names and os.path.basename(folder).startswith("tokenizer")):
            folders.clear()
            continue
        # Of two names of one folder always the same is taken.
        folders[:] = [name for name in folders if not name.startswith(".")]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        found = (os.path.join(folder, name) for name in names if TEXT.search(name) or PACKED.search(name))
        yield from (name for name in found if not os.path.basename(name).startswith(".") and os.path.isfile(name))


def _remote_files(uri: str) -> list[File]:
    from etils import epath

    if not REMOTE.match(uri):
        raise ValueError(f"{uri} cannot be read: give a local path without {uri.split('/')[0]}//, or gs:// or s3://")
    path = epath.Path(uri)
    if wildcard := WILDCARD.search(uri):
        if "**" in uri:
            raise ValueError(f"{uri} cannot be searched by **: give the folder, every text file in it is read")
        root, _, _ = uri[: wildcard.start()].rpartition("/")
        return sorted(name for name in epath.Path(root).glob(uri[len(root) + 1 :]) if not name.is_dir())
    if not path.is_dir():
        return [path] if path.exists() else []
    scheme = uri.partition("://")[0]
    files: list[epath.Path] = []
    for folder, _, names in path.walk(on_error=_stop):
        inside = str(folder)  # etils 1.15 leaves out the scheme
        parent = epath.Path(inside if URI.match(inside) else f"{scheme}://{inside.lstrip('/')}")
        files += [parent / name for name in names if TEXT.search(name) or PACKED.search(name)]
    return sorted(files)


def _stop(error: OSError) -> None:
    raise error


def is_jsonl(file: File) -> bool:
    return re.search(r"\.(jsonl|ndjson)(\.gz|\.zst)?$", file.name, re.IGNORECASE) is not None


def is_compressed(file: File) -> bool:
    return file.name.lower().endswith((".gz", ".zst"))


def content(files: Iterable[File]) -> list[str]:
    """The hash of each file's bytes, told from others that mean something else."""
    files = list(files)
    return [f"{is_jsonl(file)} {is_compressed(file)} {found}" for file, found in zip(files, hashes(files), strict=True)]


def read(file: File, errors: Errors = "strict") -> Iterator[str]:
    """The text of a file, streamed in pieces.

    Raises ValueError naming the file and the byte (of the uncompressed text) that is not UTF-8, or where a compressed
    file breaks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    at, begun = 0, False
    blocks = itertools.chain(_blocks(file), [b""])
    for block in blocks:
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            for _ in blocks:
                pass  # damage to a compressed file shows at its end at the latest, and is the better reason
            where = " of its uncompressed text" if is_compressed(file) else ""
            raise ValueError(
                f"{file} is not UTF-8 at byte {at - held + error.start}{where}: convert it to UTF-8 or leave the "
                "file out, or set --data.corpus.errors replace"
            ) from None
        at += len(block)
        if text and not begun:
            begun, text = True, text.removeprefix("\ufeff")
        if text := lines.decode(text, final=not block):
            yield text


def _blocks(file: File) -> Iterator[bytes]:
    """The bytes of a file, uncompressed."""
    at = 0
    try:
        with file.open("rb") as raw, _uncompressed(file, raw) as stream:  # pyright: ignore[reportArgumentType]
            while block := stream.read(BLOCK):
                yield block
                at += len(block)
        if not at and is_compressed(file) and size_and_time(file)[0] == 0:
            raise EOFError("the file is empty")
    except _damage() as error:
        raise ValueError(
            f"{file} is damaged: its text breaks off at byte {_end(file, at)} ({str(error).rstrip('.')}); copy it anew "
            "or leave it out"
        ) from None


def _uncompressed(file: File, stream: BinaryIO) -> BinaryIO:
    if file.name.lower().endswith(".gz"):
        return gzip.open(stream)  # pyright: ignore[reportReturnType]
    if file.name.lower().endswith(".zst"):
        return _zstd().open(stream)
    return stream


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _damage() -> tuple[type[Exception], ...]:
    """What decompressors raise; zstd's is known only where it is loaded, and not needed elsewhere."""
    loaded = [module for name, module in sys.modules.items() if name in ("backports.zstd", "compression.zstd")]
    return (EOFError, gzip.BadGzipFile, zlib.error, *(module.ZstdError for module in loaded))


def _end(file: File, at: int) -> int:
    """How many bytes a damaged file gives: `at`, and what is left before the damage, byte by byte."""
    try:
        with file.open("rb") as raw, _uncompressed(file, raw) as stream:  # pyright: ignore[reportArgumentType]
            got = 0
            while block := stream.read(min(BLOCK, at - got) or 1):
                got += len(block)
                at = max(at, got)
    except _damage():
        pass
    return at
