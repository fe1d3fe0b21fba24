"""From a corpus to a token store: in parallel, in bounded memory, and from where a killed process was."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ctx_jax.data import TELL_SECONDS, building, check_unchanged, fingerprint, write_durably
from ctx_jax.data.corpora import Corpus, Split
from ctx_jax.data.passages import PASSAGE
from ctx_jax.data.store import (
    FORMAT,
    Encoded,
    InContext,
    Store,
    encode_passages,
    in_context,
    open_store,
    token_dtype,
)
from ctx_jax.data.tokenizers import Tokenizer

BATCH = 1 << 18
"""Characters that go to a worker at a time, few enough for its cache; a passage counts 100 more for what it costs."""

SMALL = 16
"""A text of fewer batches is encoded without workers: it would be done before they have started."""

MOST = 8
"""Workers, unless more are asked for: each takes some 80 MB, so that all together stay under 1 GB on any machine."""

MARK_BYTES, MARK_SECONDS = 1 << 26, 10.0
"""After so much text or time, what is written is made durable: a killed preparation goes on from there."""

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""A worker has one core; and threads that it never uses would take as long to start as the rest of it."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Split,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> Store:
    """The store of a split, in a folder of its own inside `folder`; written only if it is not there yet.

    The folder's name is a key of all that decides its content; it appears when everything is written. One of two
    processes that prepare the same store waits for the other. A preparation that was killed, interrupted or short of
    memory goes on where it was; one that failed leaves nothing. Memory holds a few batches of text for each worker.

    Args:
        progress: told the documents and the bytes of text done so far: at once where it goes on, some times a second,
            and at the end.
        workers: processes that tokenize; None = one for each core, at most 8, which keeps memory under 1 GB; with 1 it
            is this one. The store is the same.

    Raises ValueError for text that cannot be read or changes meanwhile, ChildProcessError if a worker dies, OSError
    where memory or the disk is full.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers {workers} tokenize nothing: choose 1 or more, or None for one each core")
    keys = store_keys(corpus, tokenizer, split)
    path = folder / _name(keys)
    try:
        with building(path, resume=True) as partial:
            if partial is not None:
                tell = progress or (lambda *_: None)
                done = _write(corpus, tokenizer, split, partial, tell, workers or min(cores(), MOST))
                check_unchanged(keys, store_keys(corpus, tokenizer, split), corpus)
                about = {
                    "format": FORMAT,
                    "documents": done.documents,
                    "tokens": done.tokens,
                    "vocabulary": dataclasses.asdict(tokenizer.vocabulary),
                    **keys,
                    "tokenizer_folder": os.path.relpath(tokenizer.folder, folder),
                }
                write_durably(partial / "store.json", json.dumps(about, indent=1) + "\n")
                (partial / MARK).unlink(missing_ok=True)
    except MemoryError:
        raise OSError(errno.ENOMEM, f"memory is full ({GOES_ON})", str(path)) from None
    return open_store(path)


def store_keys(corpus: Corpus, tokenizer: Tokenizer, split: Split) -> dict[str, str]:
    """What decides a store's content."""
    splitter = f"sentencex {version('sentencex')}"
    return {
        "corpus": corpus.fingerprint(split),
        "languages": " ".join(corpus.languages),
        "passage": str(PASSAGE),
        "tokenizer": tokenizer.fingerprint,
        "split": split,
        "splitter": splitter,
    }


def store_name(corpus: Corpus, tokenizer: Tokenizer, split: Split) -> str:
    """The name of a store's folder: a key of what decides its content."""
    return _name(store_keys(corpus, tokenizer, split))


def _name(keys: dict[str, str]) -> str:
    return f"{keys['split']}-{fingerprint(FORMAT, keys)[:16]}"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


MARK = "progress.json"


GOES_ON = "what is written is kept, and the same command goes on from it"


@dataclass(frozen=True)
class Done:
    """How far a preparation is."""

    passages: int = 0
    documents: int = 0
    """Finished ones."""
    tokens: int = 0
    text: int = 0
    """Bytes of text."""
    unfinished: int = 0
    """Those of the document that is not finished."""


class StoreWriter:
    """The arrays of a store while they grow."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        """Goes on from the last mark in `folder`, if there is one and all that it speaks of is there."""
        self._folder = folder
        self.done = Done()
        names = ("tokens", "flags", "offsets", "document_bytes")
        # Unbuffered: what could not be written is not tried again when a file is closed.
        self._files = [(folder / f"{name}.bin").open("ab", buffering=0) for name in names]

        def sizes(done: Done) -> list[int]:
            counts = (done.tokens, done.tokens, done.documents + 1, done.documents)
            return np.multiply(counts, (dtype.itemsize, 1, 8, 8)).tolist()

        if (folder / MARK).is_file():
            marked = Done(**json.loads((folder / MARK).read_text()))
            there = [os.fstat(file.fileno()).st_size for file in self._files]
            if all(size >= least for size, least in zip(there, sizes(marked), strict=True)):
                self.done = marked
        if not self.done.passages:
            for file in self._files:
                file.truncate(0)
        for file, size in zip(self._files, sizes(self.done), strict=True):
            file.truncate(size)  # where the file of offsets is empty, this fills in the first: 0

    def append(self, encoded: Encoded) -> None:
        """Raises OSError where there is no room."""
        ends = self.done.tokens + np.cumsum(encoded.lengths)
        read = self.done.unfinished + np.cumsum(encoded.sizes)
        finished = np.concatenate([[0], read[encoded.last]])
        arrays = (encoded.tokens, encoded.flags, ends[encoded.last], np.diff(finished))
        for file, array in zip(self._files, arrays, strict=True):
            rest = memoryview(array.tobytes())
            while rest:
                rest = rest[file.write(rest) :]
        self.done = Done(
            passages=self.done.passages + len(encoded.lengths),
            documents=self.done.documents + int(encoded.last.sum()),
            tokens=int(ends[-1]),
            text=self.done.text + int(encoded.sizes.sum()),
            unfinished=int(read[-1] - finished[-1]),
        )

    def mark(self) -> None:
        """Makes all durable, and notes how much that is."""
        for file in self._files:
            os.fsync(file.fileno())
        write_durably(self._folder / MARK, json.dumps(dataclasses.asdict(self.done)))

    def close(self) -> None:
        for file in self._files:
            file.close()


def _write(
    corpus: Corpus, tokenizer: Tokenizer, split: Split, folder: Path, tell: Callable[[int, int], None], workers: int
) -> Done:
    with closing(StoreWriter(folder, token_dtype(tokenizer.vocabulary))) as files:
        if files.done.passages:
            tell(files.done.documents, files.done.text)  # reading up to there takes a while
        rest = islice(in_context(corpus.passages(split)), files.done.passages, None)
        with closing(encoded(batches(rest), tokenizer, workers)) as results:
            told = marked = time.monotonic()
            marked_text = files.done.text
            for result in results:
                files.append(result)
                now = time.monotonic()
                if now - told > TELL_SECONDS:
                    told = now
                    tell(files.done.documents, files.done.text)
                if now - marked > MARK_SECONDS or files.done.text - marked_text > MARK_BYTES:
                    marked, marked_text = now, files.done.text
                    files.mark()
        files.mark()
        tell(files.done.documents, files.done.text)
        return files.done


def batches(passages: Iterable[InContext]) -> Iterator[list[InContext]]:
    """Many short passages together."""
    batch: list[InContext] = []
    size = 0
    for passage in passages:
        batch.append(passage)
        size += len(passage[0]) + 100
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(batches: Iterator[list[InContext]], tokenizer: Tokenizer, workers: int) -> Generator[Encoded]:
    """The batches in order, encoded by as many processes; closing it ends them."""
    head = list(islice(batches, SMALL))
    batches = chain(head, batches)
    if workers == 1 or len(head) < SMALL:
        for batch in batches:
            yield encode_passages(batch, tokenizer)
        return
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def encode(batch: list[InContext]) -> Encoded:
        worker = free.get()
        try:
            return worker.encode(batch)
        finally:
            free.put(worker)

    with ExitStack() as stack:
        started = [stack.enter_context(closing(Worker(tokenizer))) for _ in range(workers)]
        pool = ThreadPoolExecutor(workers, "preparation")
        stack.callback(pool.shutdown, cancel_futures=True)
        for worker in started:
            stack.callback(worker.kill)  # before the pool's threads are waited for, which may wait for it
            free.put(worker)
        pending: deque[Future[Encoded]] = deque()
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) > workers + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Worker:
    """A process of `worker.py`. (multiprocessing would run an unguarded script again, or fork beside jax.)"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if type(tokenizer).__module__ == "__main__":
            raise ValueError(
                f"{type(tokenizer).__name__} is defined in the script that runs, where other processes do not find it: "
                "move it into a module, or choose workers 1"
            )
        self._start = pickle.dumps(tokenizer)
        # Modules are looked for where this process finds them, and nowhere else.
        found = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ctx_jax.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": found},
        )

    def encode(self, batch: list[InContext]) -> Encoded:
        """Raises ValueError as `encode_passages` does, ChildProcessError if the process has died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(self._start)
            self._start = b""
            pickle.dump(batch, stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            reply = pickle.load(stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise self._died() from None
        if isinstance(reply, str):
            raise ValueError(reply)
        return reply

    def _died(self) -> ChildProcessError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        short = code == -signal.SIGKILL or said.startswith("MemoryError")
        remedy = "; where memory is short, choose fewer workers" if short else ""
        return ChildProcessError(f"a process that tokenizes ended with code {code}: {said} ({GOES_ON}{remedy})")

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Ends it, and frees what it held here."""
        self.kill()
        with suppress(BrokenPipeError), self._process:  # what it had not read yet
            self._errors.close()
