"""Lines that tokenizers differ on, the same for a seed on every Python."""

# ruff: noqa: RUF001

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

SPECIAL = (
    "[MASK] [CLS] [SEP] [PAD] [UNK] [unused1] <s> </s> <pad> <unk> <mask> <cls> <sep> <eod> <eop> <|endoftext|> </w> "
    "##a"
).split()
PARTS = [
    *"aZ09é.,!?'\"-_/\\$^`~|&@#%*()[]{}<>=+ \n\t\r",
    *"\x00\x01\x07\x0b\x0c\x1b\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f\xa0\xad",
    *"\u1680\u2000\u2003\u200a\u200b\u200c\u200d\u200e\u202e\u2028\u2029\u202f\u205f\u2060\u3000\ufeff\ufffc\ufffd\ufffe",
    *"\u0300\u0301\u0308\u0327\u0345\u0591\u064b\u0940\u094d\u0e31\u20e3\u302e\u3099\ufe0f",
    *"▁ĠĊ¨´µºªß¼½²٣五İıŁøÆŒſΣςΐŉǰϓ΄;ẞΩÅﬁﬀﷺ㎏ℵⅣ①ａＡ。、「」·՞׃؟।᠆–—‘’“”…«»€£©™∑≠→",
    *"日本語漢字中文한국어ひらがなカタカナ㐀豈𠀀𪜀שלוםערביمرحباالعربيةहिन्दीไทยелщΑαΩქართული",
    *"😀😂❤👍🏽🇩🇪🏴\U000e0001\U000e0067\U000f0000\U0010ffff\ue000𝒜𝟘𐍈",
    *(
        "👩\u200d👩\u200d👧",
        "🇫🇷",
        "❤\ufe0f",
        "1\ufe0f\u20e3",
        "e\u0301\u0327",
        "n\u0303",
        "\u1100\u1161\u11a8",
        "\u0344",
    ),
    *("ΟΔΟΣ", "ΑΣ.", "İstanbul", "STRASSE", "œuvre", "naïve", "Ångström", "résumé", "ПРИВЕТ", "Łódź", "Việt"),
    *("don't", "I'm", "we'll", "they've", "you're", "he'd", "DON'T", "it`s", "``", "''", "U.S.A.", "e-mail", "a_b"),
    *("9,", "1999,", "12,345.67", "3.14", "1e-5", "٣,", "²,", "x9,", "007", "1,000,", "50%", "$5", "2026-11-28"),
    *("http://a.b/c?d=e", "user@host.org", "C++", "...", "--", "----", "!!!", "=====", "\r\n", "\n\n", "   ", "\t\t"),
    *(
        "the",
        "The",
        " of",
        "people",
        "government",
        "unaffable",
        "internationalization",
        " United States",
        "won",
        "Hello",
    ),
    *("aaaa", "aaaaaaa", "zzzz", "abababab", "www", "hahaha"),
    *SPECIAL,
]


def hard_lines(count: int, seed: int = 0) -> list[str]:
    """So many lines: strings of hard parts with more or fewer spaces, arbitrary characters, and very long words."""
    draw = random.Random(seed)
    return [one(draw, number) for number in range(count)]


def one(draw: random.Random, number: int) -> str:
    kind = number % 10
    if kind == 0:  # any characters
        return "".join(chr(character(draw)) for _ in range(draw.randint(1, 30)))
    if kind == 1:  # a long word
        length = draw.choice((99, 100, 101, 199, 200, 201, 300))
        return "".join(draw.choice("abcdefgh") for _ in range(length)) + draw.choice((" ", ", a", "日b"))
    parts = draw.choices(PARTS, k=draw.randint(1, 25))
    return (" " if kind > 5 else "").join(parts)


BLOCKS = (
    *((0x0, 0x378), (0x3A3, 0x530), (0x600, 0x70E), (0x1000, 0x10C6), (0x1400, 0x169D), (0x1D00, 0x1F16)),
    *((0x2000, 0x2065), (0x2100, 0x218C), (0x2190, 0x2427), (0x2460, 0x2B74), (0x2F00, 0x2FD6), (0x3099, 0x3100)),
    *((0x3220, 0xA48D), (0xAC00, 0xD7A4), (0xE000, 0xFA6E), (0xFB46, 0xFBC3), (0xFE76, 0xFEFD), (0xFF01, 0xFFBF)),
    *((0x10400, 0x1049E), (0x1D552, 0x1D6A6), (0x1F300, 0x1F6D8), (0x20000, 0x2A6E0), (0xE0100, 0xE01F0)),
    (0xF0000, 0xF0100),
)
"""Characters that have been what they are since before Unicode 14, so that no Python knows them differently."""


def character(draw: random.Random) -> int:
    """A code point, most often a low one."""
    return draw.randrange(*draw.choice((BLOCKS[0], draw.choice(BLOCKS))))


def data_lines(data: Path, count: int = 50_000) -> list[str]:
    """So many lines of public data sets (`make check-data`), every fourth with something hard in it, and hard ones."""
    sources = [
        read(data, "mt/multi30k.train.de").split("\n")[:5000],
        read(data, "lm/wikitext2.train.txt").split("\n")[:8000],
        read(data, "lm/tinyshakespeare.txt").split("\n")[:6000],
        read(data, "classification/subj.all.txt", "latin-1").split("\n")[:4000],
        [line.partition("\t")[0] for line in read(data, "ner/wnut17.train.conll").split("\n")[:4000]],
        read(data, "pair/stsb.train.tsv").split("\n")[:3000],
    ]
    draw = random.Random(1)
    found = [line for source in sources for line in source]
    for number in range(0, len(found), 4):
        at = draw.randint(0, len(found[number]))
        found[number] = found[number][:at] + draw.choice(PARTS) + found[number][at:]
    return [*found, *hard_lines(count - len(found), seed=1)]


def read(data: Path, name: str, encoding: str = "utf-8") -> str:
    with gzip.open(data / f"{name}.gz", "rt", encoding=encoding, newline="\n") as stream:
        return stream.read()


def derived_vocabulary(texts: Iterable[str], size: int = 8000) -> list[str]:
    """A vocab.txt: BERT's special pieces, characters of some words as such and inside of words, and the words."""
    counts = Counter(word for text in texts for word in text.split())
    words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]
    known = sorted({c for word in words[: size // 2] for c in word if ord(c) not in (0, 0xFFFD)})
    words = [word for word in words if len(word) > 1]
    inside = [f"##{word[-3:]}" for word in words if len(word) > 5]
    pieces = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return [*dict.fromkeys([*pieces, *known, *(f"##{c}" for c in known), *words, *inside])]


def digests(ids: Sequence[Sequence[int]], every: int = 500) -> list[str]:
    """A key of the ids of each 500 lines."""
    return [
        hashlib.sha256(json.dumps([list(map(int, line)) for line in ids[start : start + every]]).encode()).hexdigest()[
            :16
        ]
        for start in range(0, len(ids), every)
    ]
