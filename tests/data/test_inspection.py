from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.inspection import describe, histogram, show
from ctx_jax.data.preparation import prepare


def test_histogram_of_lengths():
    assert histogram(np.array([5, 4, 7, 8, 40])) == [
        {"from": 4, "to": 7, "documents": 3},
        {"from": 8, "to": 15, "documents": 1},
        {"from": 16, "to": 31, "documents": 0},
        {"from": 32, "to": 63, "documents": 1},
    ]
    assert histogram(np.array([], int)) == []


def test_describes_a_store(tmp_path, trained):
    (tmp_path / "text.txt").write_text("One is one. Two!\n\nOne\x07 is é")
    corpus = TextFiles(tmp_path / "text.txt", document="blank_line", whole=True)
    tokenizer = trained("bytes")
    store = prepare(corpus, tokenizer, "train", tmp_path / "data")
    about = describe(store, tokenizer, samples=2, length=10, seed=0)
    counts = {name: about[name] for name in ("documents", "tokens", "bytes", "words", "sentences", "unknown")}
    assert counts == {"documents": 2, "tokens": 30, "bytes": 26, "words": 7, "sentences": 3, "unknown": 0}
    assert about["bytes_per_token"] == 0.867
    assert store.counts().sum() == 30 and store.counts()[store.tokens[1]] == 2  # two "O"
    assert about["used"] == len(set("One is one. Two! One\x07 is é".encode())) + 2
    assert about["lengths"] == [{"from": 8, "to": 15, "documents": 1}, {"from": 16, "to": 31, "documents": 1}]
    for sample in about["samples"]:
        ids = store.tokens[sample["at"] : sample["at"] + 10]
        assert sample["text"] == tokenizer.decode(ids)
        assert sample["pieces"] == [tokenizer.piece(index) for index in ids.tolist()]
    assert describe(store, tokenizer, samples=2, length=10, seed=0) == about
    assert describe(store, tokenizer, samples=0, length=10, seed=0)["samples"] == []
    whole = describe(store, tokenizer, samples=3, length=100, seed=0)["samples"]
    assert [sample["pieces"][:3] for sample in whole] == [["<s>", "O", "n"]]
    assert whole[0]["pieces"][-3:] == ["\\xc3", "\\xa9", "</s>"]

    console = Console(width=80, record=True, quiet=False, file=io.StringIO())
    show(about | {"samples": whole}, console)
    shown = console.export_text()
    assert "One is one. Two!One\\x07 is é" in shown
    assert "8 to 15  1  ████" in shown


def test_every_tokenizer_writes_its_ids(trained):
    written = {
        "unigram": "▁the",
        "bpe": "▁the",
        "wordpiece": "the",
        "byte_bpe": "Ġthe",
        "bytes": "t",
        "characters": "t",
        "words": "the",
    }
    for kind, piece in written.items():
        tokenizer = trained(kind)
        ids = tokenizer.encode("and the", continued=False).ids.tolist()
        assert piece in [tokenizer.piece(index) for index in ids], kind
        special = {name: tokenizer.piece(index) for name, index in vars(tokenizer.vocabulary).items() if name != "size"}
        assert len(set(special.values())) == 7, kind
