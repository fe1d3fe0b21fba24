"""Finished folders (token stores, tokenizers) in object storage: copied to a local disk before use, and published."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ctx_jax.data import building
from ctx_jax.data.files import location

if TYPE_CHECKING:
    from etils import epath

SCHEMES = ("gs", "s3", "az", "hf")
"""What etils.epath knows."""

MARKERS = ("store.json", "config.json")
"""A folder is finished if it holds one of them; it is written last."""


def is_remote(path: str | Path) -> bool:
    """Whether this names a place such as gs://bucket/folder. Raises ValueError for a Path that was one: its "//" is
    lost."""
    return isinstance(location(path), str)


def fetch(remote: str, local: Path) -> bool:
    """Copies a finished folder to `local`, whole or not at all, unless it is there already; whether it is there then.
    Of the processes of a host one copies, the others wait.

    Raises ValueError if the library for this kind of place is not installed, or there is no such kind.
    """
    if local.exists():
        return True
    with _place(remote) as source:
        if _marker(source) is None:
            return False
        with building(local) as partial:
            if partial is not None:
                for file in source.iterdir():
                    _copy(file, partial / file.name)
    return True


def publish(local: Path, remote: str) -> None:
    """Copies a finished folder to `remote`, unless it is there already. What an interrupted one left there is not taken
    for finished; several hosts may publish the same.

    Raises FileNotFoundError if `local` is not finished, ValueError like `fetch`.
    """
    marker = _marker(local)
    if marker is None:
        raise FileNotFoundError(f"{local} holds no finished store or tokenizer: prepare it first")
    with _place(remote) as target:
        if (target / marker).exists():
            return
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(local.iterdir(), key=lambda file: file.name == marker):
            _copy(file, target / file.name)


@contextmanager
def _place(uri: str) -> Iterator[epath.Path]:
    from etils import epath

    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError(f"{uri} cannot be reached: choose a place of {', '.join(f'{name}://' for name in SCHEMES)}")
    try:
        yield epath.Path(uri)
    except ImportError as error:
        raise ValueError(f"{uri} cannot be reached: {error}; install gcsfs for gs://, s3fs for s3://") from None


def _marker(folder: Path | epath.Path) -> str | None:
    return next((name for name in MARKERS if (folder / name).exists()), None)


def _copy(source: Path | epath.Path, target: Path | epath.Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)  # pyright: ignore[reportArgumentType]
