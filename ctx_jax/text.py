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

from rich.console import Console

from ctx_jax.data import building, write_durably
from ctx_jax.data.corpora import Corpus, Split
from ctx_jax.data.hashes import telling
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
from ctx_jax.experiment import TOKENIZER, Data
from ctx_jax.progress import reading, speaks, tell
from ctx_jax.serialization import nearest
from ctx_jax.training.checkpoints import begun

ABOUT, IMPORTED = "text.json", "imported.json"
"""In a run folder, beside its tokenizer: which text it was begun with; what it was made of, if it was not trained."""


def open_text(
    data: Data, splits: Iterable[Split], tokenizer: Tokenizer | None = None
) -> tuple[Tokenizer, dict[Split, Store]]:
    """The tokenizer (the given one, or that of `data`) and the stores of these splits; what is not there yet is
    made, and says so on stderr. A remote `data.folder` is looked in first, and what is made is published there."""
    splits = tuple(splits)
    with reading("hashing the text", unit="files") as report, telling(report):
        for split in splits if tokenizer else ("train", *splits):
            data.corpus.fingerprint(split)  # of which what follows is a key; files are hashed once in a process
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
        return data.tokenizer.load(Path(data.tokenizer.path))
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
    if speaks():
        publish(local, remote)


def keep(run: Path, tokenizer: Tokenizer, corpus: Corpus, store: Store) -> None:
    """Puts the tokenizer into the run folder, and which text it is.

    Raises ValueError if the run was begun with another text or tokenizer; tells of another sentence splitter, which
    matters to readers of sentences alone, and if it is lost what the text was.
    """
    about = {split: corpus.fingerprint(split) for split in get_args(Split)}
    about |= {"tokenizer": tokenizer.fingerprint, "splitter": store.splitter}
    file = run / ABOUT
    if file.is_file() and begun(run):
        began = begun_with(run)
        changed = {name: f"{began[name]} -> {value}" for name, value in about.items() if began[name] != value}
        if splitter := changed.pop("splitter", None):
            tell(f"note: sentences are found by another library than when {run} was begun: {splitter}")
        if changed:
            what = ", ".join(f"{name} {change}" for name, change in changed.items())
            raise ValueError(
                f"{run} was begun with another text ({what}): restore that text, or begin a new run from this one with "
                f"--continue {run} or --from {run}"
            )
    elif speaks():
        if begun(run):
            tell(f"note: {run} has lost {ABOUT}, which says what text it was begun with: it goes on with this one")
        if tokenizer.folder != run / TOKENIZER:
            shutil.rmtree(run / TOKENIZER, ignore_errors=True)  # of a run that was never begun
            with building(run / TOKENIZER) as partial:
                assert partial is not None
                shutil.copytree(tokenizer.folder, partial, dirs_exist_ok=True)
        write_durably(file, json.dumps(about, indent=1) + "\n")


def begun_with(run: Path) -> dict[str, Any]:
    """What `keep` wrote of a run's text. Raises ValueError if it is damaged."""
    try:
        said = json.loads((run / ABOUT).read_text())
        return {name: said[name] for name in (*get_args(Split), "tokenizer", "splitter")}
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{run / ABOUT} is damaged, and does not say what text the run was begun with: put it back, or remove it "
            "if the text is the same"
        ) from None


def check_text(run: Path, store: Store) -> None:
    """Raises ValueError if this split of the run's text is not what it was when the run was begun: what is held out now
    may have been trained on. Tells if it is lost what it was."""
    if not (run / ABOUT).is_file():
        tell(f"note: {run} has lost {ABOUT}: whether its text has changed since it was begun is not known")
        return
    began = begun_with(run)[store.split]
    if began != store.corpus:
        raise ValueError(
            f"the text of {run} has changed since it was begun ({store.split} {began} -> {store.corpus}), and may have "
            "been trained on: restore it, or name what to score with --text"
        )


def kept(run: Path) -> Tokenizer:
    """The tokenizer in a run folder. Raises FileNotFoundError if it is lost, ValueError if it is not the one that the
    run was begun with: another one's ids mean other words."""
    if not (run / TOKENIZER).is_dir():
        raise FileNotFoundError(f"{run} has lost its tokenizer, which its embeddings need: restore {run / TOKENIZER}")
    tokenizer = load_tokenizer(run / TOKENIZER)
    if (run / ABOUT).is_file() and (began := begun_with(run)["tokenizer"]) != tokenizer.fingerprint:
        raise ValueError(
            f"{run / TOKENIZER} is not the tokenizer that {run} was begun with ({began} -> {tokenizer.fingerprint}), "
            "and its embeddings mean that one's ids: restore it"
        )
    return tokenizer


def local(option: str, path: str) -> Path:
    """The folder that an option names. Raises ValueError for a remote one."""
    if is_remote(path):
        raise ValueError(f"{option} {path} is remote: choose a folder on this machine")
    return Path(path)


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
    if isinstance(config, Pretrained):
        raise ValueError(f"{config.path} is trained already: name a kind of tokenizer to train")
    if output.exists():
        raise ValueError(f"{output} is there already: choose another --output")
    with reading(f"learning {type(config).__name__}", corpus.size("train")) as report:
        tokenizer = config.train(train_texts(corpus, report), output)
    tell(f"{output}: {tokenizer.vocabulary.size:,} ids")
    return {"tokenizer": str(output), "vocabulary": tokenizer.vocabulary.size, "fingerprint": tokenizer.fingerprint}


def inspect_store(
    path: Path, samples: int, length: int, seed: int, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Shows what is in a store, and returns it (`inspection.describe`). The tokenizer is by default the one that the
    store was made with, where it was then."""
    for name, number in (("samples", samples), ("length", length), ("seed", seed)):
        if number < 0:
            raise ValueError(f"--{name} {number} is negative: choose 0 or more")
    store = open_store(path)
    tokenizer = tokenizer or load_tokenizer(path.resolve().parent / store.tokenizer_folder)
    check_tokenizer(store, tokenizer)
    about = describe(store, tokenizer, samples, length, seed)
    show(about, Console(stderr=True, highlight=False))
    return about
