"""From files to a store: the same in whatever form the text comes, and however long its lines are."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data import preparation
from ctx_jax.data.corpora import TextFiles, documents
from ctx_jax.data.preparation import prepare, store_name
from ctx_jax.data.store import WORD
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tfds import Tfds, write_tfds
from ctx_jax.data.tokenizers import tokenizer_name

HARD = "[MASK] </s> <|endoftext|> \u2028 \x85 \0 é e\u0301 日本語。 🙂 ﬁ ▁ --- \x0b \u3000 \u0301 x\xa0y".split(" ")
WORDS = "the of state Union congress. war, peace! (people) citizens? it's 1,000 Mr. Smith's 3.14!".split()
SPLITS = ("train", "validation", "test")


def texts() -> list[str]:
    """100 documents, all different, of a few lines each."""
    chance = random.Random(0)

    def line() -> str:
        return "So " + " ".join(chance.choices(HARD + 3 * WORDS, k=chance.randint(1, 30)))

    return [f"Document {number}.\n" + "\n".join(line() for _ in range(8)) for number in range(100)]


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_the_same_store_from_any_form(tmp_path, trained):
    given = texts()
    whole = "\n\n".join(given).encode()
    for number, text in enumerate(given):
        write(tmp_path / "many" / f"{number:03}.txt", text + "\n")
        write(tmp_path / "packed" / f"{number:03}.txt.gz", gzip.compress(text.replace("\n", "\r\n").encode()))
    json_lines = "\n".join(json.dumps({"id": number, "text": text}) for number, text in enumerate(given))
    many = TextFiles(tmp_path / "many")
    corpora = {
        "many": many,
        "packed": TextFiles(tmp_path / "packed"),
        "one": TextFiles(write(tmp_path / "one.txt", whole), document="blank_line"),
        "gz": TextFiles(write(tmp_path / "one.txt.gz", gzip.compress(whole)), document="blank_line"),
        "jsonl": TextFiles(write(tmp_path / "one.jsonl", json_lines)),
        "tfds": Tfds(write_tfds(many, "given", tmp_path / "sets").parent.name, tmp_path / "sets"),
    }
    chance = random.Random(1)
    names = chance.sample(range(100), 100)
    for name, text in zip(names, given, strict=True):
        write(tmp_path / "shuffled" / f"{name:03}.txt", text)
    for split in SPLITS:
        stores = {
            name: prepare(corpus, trained("bytes"), split, tmp_path / "stores" / name)
            for name, corpus in corpora.items()
        }
        for file in ("tokens", "flags", "offsets", "document_bytes"):
            assert len({(store.folder / f"{file}.bin").read_bytes() for store in stores.values()}) == 1
        found = list(documents(many.passages(split)))
        store = stores["one"]
        parts = np.split(store.tokens, store.offsets[1:-1])
        assert [trained("bytes").decode(part) for part in parts] == found
    shuffled = TextFiles(tmp_path / "shuffled", whole=True)
    store = prepare(shuffled, trained("bytes"), "train", tmp_path / "stores" / "shuffled")
    parts = np.split(store.tokens, store.offsets[1:-1])
    decoded = [trained("bytes").decode(part) for part in parts]
    assert decoded != given
    assert set(decoded) == set(given)
    apart = [text for split in SPLITS for text in documents(TextFiles(tmp_path / "shuffled").passages(split))]
    assert sorted(apart) == sorted(given)


@pytest.fixture(scope="module")
def line() -> str:
    """One line of about 1.5 million characters."""
    chance = random.Random(0)
    parts = [" ".join(chance.choices(HARD + 20 * WORDS, k=1000)) for _ in range(300)]
    text = chance.choice(["  ", " "]).join(parts).replace("\n", " ")
    assert 1_400_000 < len(text) < 2_500_000
    return text.strip("\n")


@pytest.mark.parametrize(
    "kind", ["unigram", "bpe", "wordpiece", "wordpiece_cased", "byte_bpe", "bytes", "characters", "words"]
)
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_long_line_has_the_ids_of_the_whole(tmp_path, trained, line, kind, form):
    data = line if form == "txt" else json.dumps({"text": line}, ensure_ascii=False)
    corpus = TextFiles(write(tmp_path / f"line.{form}", data), whole=True)
    assert sum(1 for _ in corpus.passages("train")) > 4
    tokenizer = trained(kind)
    store = prepare(corpus, tokenizer, "train", tmp_path / "stores", workers=1)
    whole = tokenizer.encode(line)
    assert store.document_bytes.tolist() == [len(line.encode())]
    assert np.array_equal(store.tokens[1:-1], whole.ids)
    assert np.array_equal((store.flags[1:-1] & WORD) > 0, whole.word_starts())


def test_what_is_made_anew(tmp_path, trained, monkeypatch):
    main, other = write(tmp_path / "a.txt", "text " * 100), write(tmp_path / "b.txt", "other")

    def names(**options):
        corpus = TextFiles(main, validation=other, **options)
        stores = [store_name(corpus, trained("bytes"), split) for split in ("train", "validation")]
        return tokenizer_name(Bytes(), corpus), *stores

    def changed(first, second):
        return [a != b for a, b in zip(first, second, strict=True)]

    before = names()
    assert changed(before, names(language="de")) == [False, True, True]
    write(other, "edited, it has another length")
    assert changed(before, names()) == [False, False, True]
    monkeypatch.setattr(preparation, "PASSAGE", 1000)
    assert changed(before, names())[:2] == [False, True]
