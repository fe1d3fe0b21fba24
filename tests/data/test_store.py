from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from ctx_jax.data import building, fingerprint
from ctx_jax.data.corpora import Passage
from ctx_jax.data.store import SENTENCE, WORD, encode_passage, open_store, prepare, sentence_characters

TEXTS = (
    "The Union is strong. Mr. J. F. Smith said so on Jan. 3 in the U.S. Senate.\nDid he? Yes!\n\nA heading\n\nThe end.",
    "One line\nbroken in two. And \u201ca quote.\u201d Then\u2028more.",
    "  an indented text 😀 [MASK] </s>. So.",
)


@dataclass(frozen=True)
class Texts:
    """A corpus of given texts."""

    texts: tuple[str, ...] = TEXTS
    language: str = "en"

    def passages(self, split):
        return (Passage(text, True, True, self.language) for text in (self.texts if split == "train" else ()))

    def size(self, split):
        return None

    def fingerprint(self):
        return fingerprint(self)


def test_prepared_store_holds_the_text(tmp_path, tokenizer):
    told = []
    store = prepare(Texts(), tokenizer, "train", tmp_path, lambda *done: told.append(done))
    assert store.tokens.dtype == np.uint16
    assert store.vocabulary == tokenizer.vocabulary
    sizes = [len(text.encode()) for text in TEXTS]
    assert store.document_bytes.tolist() == sizes
    assert told == [(1, sizes[0]), (2, sum(sizes[:2])), (3, sum(sizes))]
    assert store.offsets[0] == 0
    assert store.offsets[-1] == len(store.tokens) == len(store.flags)
    for text, (start, end) in zip(TEXTS, itertools.pairwise(store.offsets), strict=True):
        assert store.tokens[start] == tokenizer.vocabulary.begin
        assert store.tokens[end - 1] == tokenizer.vocabulary.end
        assert store.flags[start] == store.flags[end - 1] == 0
        inside = store.tokens[start + 1 : end - 1]
        assert tokenizer.decode(inside) == text
        assert not set(inside.tolist()) & set(tokenizer.vocabulary.special)
        assert (store.flags[start:end] & WORD).sum() == len(text.split())
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_sentences_begin_where_the_text_says(tokenizer):
    sentences = [
        [
            "The Union is strong.",
            "Mr. J. F. Smith said so on Jan. 3 in the U.S. Senate.",
            "Did he?",
            "Yes!",
            "A heading",
            "The end.",
        ],
        ["One line\nbroken in two.", "And \u201ca quote.\u201d", "Then\u2028more."],
        ["an indented text 😀 [MASK] </s>.", "So."],
    ]
    for text, expected in zip(TEXTS, sentences, strict=True):
        ids, flags = encode_passage(Passage(text, True, True, "en"), tokenizer)
        begins = np.flatnonzero(flags & SENTENCE)
        assert begins[0] == 1
        parts = [tokenizer.decode(part) for part in np.split(ids, begins)[1:]]
        assert [part.strip() for part in parts] == expected


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\u2028"])
def test_documents_without_words(tokenizer, text):
    ids, flags = encode_passage(Passage(text, True, True, "en"), tokenizer)
    assert tokenizer.decode(ids) == text
    assert not flags.any()
    assert ids[0] == tokenizer.vocabulary.begin


def test_sentence_characters_survive_white_space_outside_ascii():
    # An initial before U+2028 makes the splitter panic if it sees that character.
    assert sentence_characters("Mr A.\u2028B. Then.", "en").tolist() == [0, 9]
    assert sentence_characters("\u3000 One.\u00a0Two.", "en").tolist() == [2, 7]


def test_kept_by_what_decides_the_content(tmp_path, tokenizer):
    store = prepare(Texts(), tokenizer, "train", tmp_path)
    written = store.folder.stat().st_mtime_ns
    assert prepare(Texts(), tokenizer, "train", tmp_path).folder == store.folder
    assert store.folder.stat().st_mtime_ns == written
    others = {
        prepare(Texts(TEXTS[:1]), tokenizer, "train", tmp_path).folder,
        prepare(Texts(), tokenizer, "validation", tmp_path).folder,
        prepare(Texts(language="de"), tokenizer, "train", tmp_path).folder,
    }
    assert len(others | {store.folder}) == 4


def test_empty_split(tmp_path, tokenizer):
    store = prepare(Texts(), tokenizer, "validation", tmp_path)
    assert len(store.tokens) == 0
    assert store.offsets.tolist() == [0]


def test_unusable_stores(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="no token store in"):
        open_store(tmp_path)
    folder = prepare(Texts(), tokenizer, "train", tmp_path).folder
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(about | {"format": 0}))
    with pytest.raises(ValueError, match="has format 0, this version reads"):
        open_store(folder)
    (folder / "store.json").write_text(json.dumps(about))
    os.truncate(folder / "tokens.bin", 10)
    with pytest.raises(ValueError, match=r"is damaged: tokens\.bin is not \d+ bytes"):
        open_store(folder)


def test_failed_preparation_leaves_nothing(tmp_path, tokenizer):
    def fail(documents: int, size: int) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        prepare(Texts(), tokenizer, "train", tmp_path, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_killed_preparation_leaves_nothing_that_looks_finished(tmp_path, tokenizer):
    """A process is killed in the middle of filling a folder; the next one starts clean."""
    code = (
        "import os, signal, sys; from pathlib import Path; from ctx_jax.data import building\n"
        "with building(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('written')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "store"
    assert subprocess.run([sys.executable, "-c", code, str(target)], check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    with building(target) as folder:
        assert folder is not None
        assert list(folder.iterdir()) == []
        (folder / "whole").write_text("written")
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_two_at_once_write_one_store(tmp_path, tokenizer):
    started, go_on, read = threading.Event(), threading.Event(), []

    @dataclass(frozen=True)
    class Slow(Texts):
        def passages(self, split):
            read.append(split)
            started.set()
            assert go_on.wait(10)
            yield from super().passages(split)

    stores = []
    threads = [
        threading.Thread(target=lambda: stores.append(prepare(Slow(), tokenizer, "train", tmp_path))) for _ in range(2)
    ]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert read == ["train"]
    assert stores[0].folder == stores[1].folder
    assert np.array_equal(stores[0].tokens, stores[1].tokens)


def test_boundary_of_one_id(tokenizer):
    """GPT-2's only boundary begins a document and ends none."""

    class OneBoundary:
        vocabulary = tokenizer.vocabulary.__class__(
            **(vars(tokenizer.vocabulary) | {"end": tokenizer.vocabulary.begin})
        )
        encode = staticmethod(tokenizer.encode)

    ids, flags = encode_passage(Passage("A text.", True, True, "en"), OneBoundary())  # pyright: ignore[reportArgumentType]
    assert ids[0] == tokenizer.vocabulary.begin
    assert tokenizer.decode(ids[1:]) == "A text."
    assert len(ids) == len(flags)
    assert tokenizer.vocabulary.begin not in ids[1:]
