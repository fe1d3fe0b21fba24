"""Sentences with a tag for each word, as CoNLL's shared tasks wrote them: a word a line, its tag in the last column, a
blank line after each sentence."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ctx_jax.data.passages import LINE_END, between
from ctx_jax.evaluation.tasks import reader
from ctx_jax.transfer.texts import checked, input_file, joined


class Sentence(NamedTuple):
    """Words and their tags, equally many."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def sentences(path: str | Path) -> list[Sentence]:
    """All of a file (.gz and .zst, too). Columns stand apart by white space; lines of -DOCSTART- are left out. Raises
    ValueError, naming file and line, for a word without a tag or a file without sentences."""
    file = input_file(str(path))
    found, words, tags = [], [], []
    for place, line in enumerate(map(joined, checked(file, between(LINE_END, reader(file, "strict")))), 1):
        columns = line.split("\t") if "\t" in line else line.split()
        if not line.strip():
            if words:
                found.append(Sentence(tuple(words), tuple(tags)))
            words, tags = [], []
        elif columns[0] != "-DOCSTART-":
            if len(columns) < 2 or not columns[0].strip():
                raise ValueError(f"{file} line {place}: {line!r} is no word with a tag: put a tab between the two")
            words.append(columns[0])
            tags.append(columns[-1].strip())
    if words:
        found.append(Sentence(tuple(words), tuple(tags)))
    if not found:
        raise ValueError(f"{file} has no sentence: give a word and its tag a line")
    return found
