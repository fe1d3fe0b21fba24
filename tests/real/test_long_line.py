"""One line of 200 MB, with an emoji in it: its ids are those of the whole, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.store import WORD, open_store
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tokenizers import load_tokenizer

DATA = Path(os.environ["DATA"])

SIZE = 200_000_000
SECONDS = 300.0
MEMORY = 1_000_000_000
"""Bytes of one process."""

PREPARE = """
import sys
from pathlib import Path
from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.preparation import prepare
from ctx_jax.data.tokenizers import load_tokenizer

text, tokenizer, folder = map(Path, sys.argv[1:])
print(prepare(TextFiles(text, whole=True), load_tokenizer(tokenizer), "train", folder, workers=1).folder)
(peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
"""


@pytest.fixture(scope="module")
def line() -> str:
    """WikiText-2 again and again, without line ends."""
    with gzip.open(DATA / "lm" / "wikitext2.valid.txt.gz", "rt", encoding="utf-8") as stream:
        text = " ".join(stream.read().split()) + " "
    size = len(text.encode())
    return (text * (SIZE // size // 2) + "\U0001f642 " + text * (SIZE // size // 2 + 1)).strip()


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_its_ids_are_those_of_the_whole(tmp_path, line, form):
    file = tmp_path / f"line.{form}"
    file.write_text(line if form == "txt" else json.dumps({"text": line}, ensure_ascii=False), encoding="utf-8")
    tokenizer = Bytes().train((), tmp_path / "tokenizer")
    start = time.monotonic()
    arguments = [sys.executable, "-c", PREPARE, str(file), str(tokenizer.folder), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < SECONDS
    folder, peak = done.stdout.split()
    assert int(peak) < MEMORY
    store = open_store(Path(folder))
    expected = np.frombuffer(line.encode(), np.uint8)
    assert store.document_bytes.tolist() == [len(expected)]
    assert np.array_equal(store.tokens[1:-1] - load_tokenizer(tokenizer.folder).encode("\0").ids[0], expected)
    before = np.concatenate([[ord(" ")], expected[:-1]])
    assert np.array_equal((store.flags[1:-1] & WORD) > 0, (expected != ord(" ")) & (before == ord(" ")))
    assert sum(1 for _ in TextFiles(file, whole=True).passages("train")) > 700
