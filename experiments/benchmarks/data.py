"""How fast text becomes batches, and in how much memory.

    python experiments/benchmarks/data.py --text PATH --megabytes 100

Repeats the State of the Union speeches, and the text in PATH, under different names, trains a unigram
SentencePiece of 16,000 pieces on one copy, and prints one JSON line for each measurement:

    raw encoder    SentencePiece's own ways on the same cores: lines or documents, one process with threads
    prepare        the whole way from files to a token store, by turns with them; medians of the rounds
    peak memory    of all processes together, each shared page counted once, while the store is prepared
    block          a random row of 512 tokens
    loader         tokens that leave the loader for one CPU device
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import sentencepiece

from ctx_jax.data.corpora import Sotu, TextFiles, documents
from ctx_jax.data.preparation import cores, prepare
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.sentences import sentence_characters
from ctx_jax.data.store import Store
from ctx_jax.data.tokenizers import Tokenizer, load_tokenizer

PIECES, LENGTH, BATCH, LINE = 16_000, 512, 64, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a file, a folder or a glob of text beside the speeches")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", nargs=3, help=argparse.SUPPRESS)  # what the memory of is measured
    options = parser.parse_args()
    if options.store:
        text, tokenizer, folder = map(Path, options.store)
        prepare(corpus(text), load_tokenizer(tokenizer), "train", folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.text, options.megabytes * 1e6, options.rounds)


def measure(folder: Path, text: str | None, size: float, rounds: int) -> None:
    texts = [text for split in ("train", "validation", "test") for text in documents(Sotu().passages(split))]
    if text is not None:
        texts += documents(corpus(text).passages("train"))
    for name in ("files", "lines", "one"):
        (folder / name).mkdir()
    written = write_files(folder / "files", texts, size)
    tell("corpus", written / 1e6, "MB", files=len(list((folder / "files").iterdir())), cores=cores())
    write_files(folder / "lines", ["\n".join(short_lines(text)) for text in texts], size / 4)
    with (folder / "one" / "one.txt").open("wb") as one:
        for file in sorted((folder / "files").iterdir()):
            one.write(file.read_bytes())

    start = time.perf_counter()
    tokenizer = SentencePiece(vocabulary_size=PIECES).train(texts, folder / "tokenizer")
    tell("tokenizer training", time.perf_counter() - start, "s")
    copies = max(1, round(size / sum(len(text.encode()) for text in texts)))
    raw_lines = [line for text in texts for line in text.split("\n") if line]
    short = [line for text in texts for line in short_lines(text)]

    ways = {
        "raw encoder, lines": partial(raw, tokenizer, raw_lines, copies),
        "raw encoder, documents": partial(raw, tokenizer, texts, copies),
        "prepare": partial(prepared, folder / "files", tokenizer, "file"),
        "prepare, one document": partial(prepared, folder / "one", tokenizer, "file"),
        "raw encoder, short lines": partial(raw, tokenizer, short, max(1, copies // 4)),
        "prepare, short lines": partial(prepared, folder / "lines", tokenizer, "line"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            speeds[name].append(way())
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        tell(name, medians[name], "MB/s", rounds=values)
    fastest = max(medians["raw encoder, lines"], medians["raw encoder, documents"])
    encoders = {"": fastest, ", one document": fastest, ", short lines": medians["raw encoder, short lines"]}
    for name, encoder in encoders.items():
        tell(f"prepare / raw encoder{name}", medians[f"prepare{name}"] / encoder, "")
    tell("sentences", speed(texts, lambda text: sentence_characters(text, "en")), "MB/s")
    for name in ("files", "one"):
        tell(f"peak memory, {name}", peak_memory(folder / name, tokenizer, folder / "store") / 1e6, "MB")

    read(prepare(corpus(folder / "files"), tokenizer, "train", folder / "store"), rounds)


def corpus(path: str | Path, document: Literal["file", "line"] = "file") -> TextFiles:
    """All of the text is for training."""
    return TextFiles(path, document=document, whole=True)


def write_files(folder: Path, texts: list[str], size: float) -> int:
    """Writes the texts again and again; returns the bytes."""
    written = number = 0
    while written < size:
        written += (folder / f"{number:06}.txt").write_bytes(texts[number % len(texts)].encode())
        number += 1
    return written


def short_lines(text: str) -> list[str]:
    """The text in lines of about 300 characters."""
    plain = " ".join(text.split())
    return [plain[start : start + LINE] for start in range(0, len(plain), LINE)]


def raw(tokenizer: Tokenizer, texts: list[str], copies: int) -> float:
    """MB/s of SentencePiece alone."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / "sentencepiece.model"))
    start = time.perf_counter()
    for _ in range(copies):
        processor.encode(texts, out_type="numpy", num_threads=cores())
    return copies * sum(len(text.encode()) for text in texts) / (time.perf_counter() - start) / 1e6


def prepared(text: Path, tokenizer: Tokenizer, document: Literal["file", "line"]) -> float:
    """MB/s from files to a store; hashing the files, which is done once and kept, does not count."""
    files = corpus(text, document)
    files.fingerprint("train")
    store = text.parent / "store"
    start = time.perf_counter()
    size = prepare(files, tokenizer, "train", store).document_bytes.sum()
    seconds = time.perf_counter() - start
    shutil.rmtree(store)
    return size / seconds / 1e6


def speed(texts: Iterable[str], function: Callable[[str], object]) -> float:
    """MB/s on one core."""
    size, start = 0, time.perf_counter()
    for text in texts:
        function(text)
        size += len(text.encode())
    return size / (time.perf_counter() - start) / 1e6


def peak_memory(text: Path, tokenizer: Tokenizer, store: Path) -> int:
    """Bytes, while another process prepares the store."""
    arguments = ["--store", str(text), str(tokenizer.folder), str(store)]
    process = subprocess.Popen([sys.executable, __file__, *arguments])
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise ChildProcessError(f"the process that was measured ended with code {process.returncode}")
    shutil.rmtree(store)
    return peak


def tree_memory(pid: int) -> int:
    """Proportional set size of a process and of all that it started."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        tasks = os.listdir(f"/proc/{pid}/task")
        children = [int(c) for task in tasks for c in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (OSError, StopIteration):  # it has just ended
        return 0
    return own + sum(map(tree_memory, children))


def read(store: Store, rounds: int) -> None:
    """Times of reading."""
    import jax

    from ctx_jax.data.loader import Loader
    from ctx_jax.data.pairs import Pairs, Sentences
    from ctx_jax.data.readers import Blocks, Lanes

    chance = random.Random(0)
    numbers = [chance.randrange(10_000) for _ in range(2000)]
    blocks = Blocks(LENGTH)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for n in numbers:
            blocks.batch(store, n, [0], batch_size=1, seed=0)
        times.append((time.perf_counter() - start) / len(numbers) * 1e6)
    tell("block", statistics.median(times), "us", rounds=times)

    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    for reader in (blocks, Lanes(LENGTH), Lanes(LENGTH, pairs=True), Pairs(LENGTH), Sentences(LENGTH)):
        speeds = []
        for _ in range(rounds):
            with closing(iter(Loader(store, reader, BATCH, seed=0, sharding=sharding))) as batches:
                for _ in range(10):
                    next(batches)
                start = time.perf_counter()
                for _ in range(200):
                    jax.block_until_ready(next(batches))
                speeds.append(200 * BATCH * LENGTH / (time.perf_counter() - start))
        tell(f"loader, {reader}", statistics.median(speeds), "tokens/s", rounds=speeds)


def tell(name: str, value: float, unit: str, **more: object) -> None:
    print(json.dumps({"name": name, "value": float(f"{value:.4g}"), "unit": unit, **more}), flush=True)


if __name__ == "__main__":
    main()
