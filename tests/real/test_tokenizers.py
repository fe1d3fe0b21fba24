"""Every tokenizer on 20,000 hard lines of public data: make check-data DATA=FOLDER."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import SPLIT, ByteLevelBPE, WordPiece
from ctx_jax.data.symbols import Bytes, Characters, Words

DATA = Path(os.environ["DATA"])

HARD = [
    *"\t\r▁\x0b\x1c\x85\xa0\x00\u2028\u2029\u3000\ufeff\u0301\u200dé日語שלם😀🇩🇪ﬁ¨İ\U0010ffff",
    *"[MASK] </s> <unk> <|endoftext|> <pad> [CLS] ##s <0x0A>".split(),
    *("👩\u200d👩\u200d👧", "e\u0301\u0327", "हिन्दी", "한국어", "漢字、かな。", "  ", "---", "x" * 200),
]
KINDS = {
    "unigram": SentencePiece(vocabulary_size=8000),
    "bpe": SentencePiece(vocabulary_size=8000, model_type="bpe", normalization="NFKC"),
    "wordpiece": WordPiece(vocabulary_size=8000),
    "wordpiece_cased": WordPiece(vocabulary_size=8000, lowercase=False),
    "byte_bpe": ByteLevelBPE(vocabulary_size=8000),
    "bytes": Bytes(),
    "characters": Characters(),
    "words": Words(vocabulary_size=20_000),
}


def read(name: str, encoding: str = "utf-8") -> str:
    with gzip.open(DATA / f"{name}.gz", "rt", encoding=encoding, newline="\n") as stream:
        return stream.read()


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """20,000 lines; every other one with something hard put into it, and its own spaces kept."""
    squad = json.loads(read("qa/xquad.en.first24.json"))["data"]
    sources = [
        read("mt/multi30k.train.de").split("\n")[:4000],
        read("lm/wikitext2.valid.txt").split("\n")[:3700],
        read("lm/tinyshakespeare.txt").split("\n")[:5000],
        read("classification/subj.all.txt", "latin-1").split("\n")[:3000],
        [paragraph["context"] for article in squad for paragraph in article["paragraphs"]],
        [line.partition("\t")[0] for line in read("ner/wnut17.train.conll").split("\n")[:2000]],
        read("pair/stsb.train.tsv").split("\n")[:2500],
    ]
    chance = random.Random(0)
    found = list(itertools.chain.from_iterable(sources))
    for number in range(0, len(found), 2):
        at = chance.randrange(len(found[number]) + 1)
        found[number] = found[number][:at] + "".join(chance.choices(HARD, k=3)) + found[number][at:]
    chance.shuffle(found)
    assert len(found) >= 20_000
    return found[:20_000]


@pytest.fixture(params=KINDS, scope="session")
def kind(request, lines, tmp_path_factory):
    texts = ["\n".join(lines[number : number + 100]) for number in range(0, len(lines), 100)]
    return KINDS[request.param].train(iter(texts), tmp_path_factory.mktemp("kinds") / request.param)


def test_lines_come_back_and_words_start_where_they_do(kind, lines):
    special = set(kind.vocabulary.special)
    dropped = total = 0
    for line in lines:
        encoding = kind.encode(line)
        assert kind.decode(encoding.ids) == kind.normalize(line)
        assert special.isdisjoint(encoding.ids.tolist())
        words = encoding.text.split()
        gone = [word for word in words if not kind.normalize(word)]
        assert encoding.word_starts().sum() == len(words) - len(gone)
        dropped, total = dropped + len(gone), total + len(words)
    assert dropped == 0 or (type(kind).__name__ == "WordPieceTokenizer" and dropped < total / 100)


def test_passages_have_the_ids_of_the_whole(kind, lines):
    text = "\n".join(lines[:3000])
    places = (i for i in range(1, len(text) - 1) if text[i] in "\n " and not text[i + 1].isspace())
    cuts = [i for i in places if text[i - 1 : i + 1] != "\n "]
    cuts = sorted(random.Random(0).sample(cuts, 2000))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    encodings = [kind.encode(part, continued=number > 0) for number, part in enumerate(parts)]
    whole = kind.encode(text)
    assert np.array_equal(np.concatenate([encoding.ids for encoding in encodings]), whole.ids)
    assert np.array_equal(np.concatenate([encoding.word_starts() for encoding in encodings]), whole.word_starts())
    assert kind.decode(whole.ids) == kind.normalize(text)


def test_gpt2_s_pieces_never_cross_the_parts(lines, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text(read(f"vocab/gpt2.{name}"), encoding="utf-8")
    gpt2 = tokenizers.Tokenizer(models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for start in range(0, len(lines), 20):
        text = "\n".join(lines[start : start + 20])
        parts = SPLIT.findall(text)
        assert "".join(parts) == text
        assert [i for part in parts for i in gpt2.encode(part).ids] == gpt2.encode(text).ids
