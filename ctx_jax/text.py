"""The text of an experiment and of its run: tokenizers and token stores that are made once and kept.

A run folder holds its tokenizer, and says which text it was begun with (text.json), so that a run is never resumed on
other text, or scored and continued with other tokens, than it was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
from rich.console import Console

from ctx_jax.data import building
from ctx_jax.data.corpora import Corpus, Split
from ctx_jax.data.inspection import describe, show
from ctx_jax.data.preparation import prepare, store_name
from ctx_jax.data.remote import fetch, is_remote, publish
from ctx_jax.data.store import Store, check_tokenizer, open_store
from ctx_jax.data.tokenizers import (
    Pretrained,
    Tokenizer,
    TokenizerConfig,
    load_tokenizer,
    tokenizer_name,
    train_texts,
)
from ctx_jax.experiment import Data
from ctx_jax.progress import reading, tell
from ctx_jax.serialization import nearest

TOKENIZER, ABOUT = "tokenizer", "text.json"
"""In a run folder: its tokenizer, and which text it was begun with."""


def open_text(
    data: Data, splits: Iterable[Split], tokenizer: Tokenizer | None = None
) -> tuple[Tokenizer, dict[Split, Store]]:
    """The tokenizer (the given one, or that of `data`) and the stores of these splits; what is not there yet is
    made, and says so on stderr. A remote `data.folder` is looked in first, and what is made is published there."""
    tokenizer = tokenizer or own_tokenizer(data)
    stores: dict[Split, Store] = {}
    for split in splits:
        with (
            at_hand(data, store_name(data.corpus, tokenizer, split)) as folder,
            reading(f"tokenizing {split}", data.corpus.size(split)) as report,
        ):
            stores[split] = prepare(data.corpus, tokenizer, split, folder.parent, report, data.workers)
    return tokenizer, stores


def own_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer of `data`, learned from its train split unless that is done."""
    if isinstance(data.tokenizer, Pretrained):
        return load_tokenizer(Path(data.tokenizer.path))
    with (
        at_hand(data, tokenizer_name(data.tokenizer, data.corpus)) as folder,
        reading(f"learning {type(data.tokenizer).__name__}", data.corpus.size("train")) as report,
    ):
        return data.tokenizer.train(train_texts(data.corpus, report), folder)


@contextmanager
def at_hand(data: Data, name: str) -> Iterator[Path]:
    """The local folder of this name, copied from a remote `data.folder` if it is there, published there if not."""
    if not is_remote(data.folder):
        yield Path(data.folder) / name
        return
    local, remote = data.local_folder / name, f"{str(data.folder).rstrip('/')}/{name}"
    fetch(remote, local)
    yield local
    if jax.process_index() == 0:
        publish(local, remote)


def keep(run: Path, tokenizer: Tokenizer, store: Store) -> None:
    """Puts the tokenizer into the run folder, and which text it is.

    Raises ValueError if the run was begun with another text or tokenizer.
    """
    about = {"corpus": store.corpus, "tokenizer": tokenizer.fingerprint}
    file = run / ABOUT
    if file.is_file():
        began = json.loads(file.read_text())
        changed = [f"{name} {began.get(name)} -> {value}" for name, value in about.items() if began.get(name) != value]
        if changed:
            raise ValueError(
                f"{run} was begun with another text ({', '.join(changed)}): restore that text, or begin a new run from "
                f"this one with --continue {run} or --from {run}"
            )
    elif jax.process_index() == 0:
        with building(run / TOKENIZER) as partial:
            if partial is not None:
                shutil.copytree(tokenizer.folder, partial, dirs_exist_ok=True)
        file.write_text(json.dumps(about, indent=1) + "\n")


def kept(run: Path) -> Tokenizer | None:
    """The tokenizer in a run folder, if it has one."""
    return load_tokenizer(run / TOKENIZER) if (run / TOKENIZER).is_dir() else None


def known_split(name: str) -> Split:
    """Raises ValueError for what is no split."""
    for split in get_args(Split):
        if split == name:
            return split
    raise ValueError(f"unknown split {name!r}{nearest(name, list(get_args(Split)))}; choose train, validation or test")


def prepare_all(data: Data) -> dict[str, Any]:
    """Tokenizer and stores of all splits. Returns {"tokenizer": folder, split: {"store", "documents", "tokens",
    "bytes"}}."""
    tokenizer, stores = open_text(data, get_args(Split))
    return {"tokenizer": str(tokenizer.folder)} | {
        split: {
            "store": str(store.folder),
            "documents": len(store.document_bytes),
            "tokens": len(store.tokens),
            "bytes": int(store.document_bytes.sum()),
        }
        for split, store in stores.items()
    }


def train_tokenizer(config: TokenizerConfig, corpus: Corpus, output: Path) -> dict[str, Any]:
    """Learns a tokenizer into `output`. Raises ValueError if that is there already."""
    if output.exists():
        raise ValueError(f"{output} is there already: choose another --output")
    with reading(f"learning {type(config).__name__}", corpus.size("train")) as report:
        tokenizer = config.train(train_texts(corpus, report), output)
    tell(f"{output}: {tokenizer.vocabulary.size:,} ids")
    return {"tokenizer": str(output), "vocabulary": tokenizer.vocabulary.size, "fingerprint": tokenizer.fingerprint}


def inspect_store(path: Path, samples: int, length: int, seed: int) -> dict[str, Any]:
    """Shows what is in a store, and returns it (`inspection.describe`)."""
    for name, number in (("samples", samples), ("length", length)):
        if number < 0:
            raise ValueError(f"--{name} {number} is negative: choose 0 or more")
    store = open_store(path)
    tokenizer = load_tokenizer(path.parent / store.tokenizer_folder)
    check_tokenizer(store, tokenizer)
    about = describe(store, tokenizer, samples, length, seed)
    show(about, Console(stderr=True, highlight=False))
    return about
