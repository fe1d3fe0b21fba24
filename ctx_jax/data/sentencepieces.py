"""SentencePiece: unigram and byte-pair pieces."""

from __future__ import annotations

import hashlib
import heapq
import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece

from ctx_jax.contract import Vocabulary
from ctx_jax.data import building, fingerprint
from ctx_jax.data.tokenizers import Encoding, Normalization, Tokenizer, save_config, unicode_normalized


@dataclass(frozen=True)
class SentencePiece:
    """SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226) with byte fallback, so that no text is unknown."""

    vocabulary_size: int = 2048
    """Pieces, the 7 special ids and 256 bytes included."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """Unigram language model (Kudo 2018, arXiv 1804.10959) or byte-pair encoding."""
    normalization: Normalization = "NFC"
    """Unicode normalisation of all text, in training and in use."""
    character_coverage: float = 0.9995
    """The part of the training text's characters that get pieces; the rest is spelled in bytes."""
    training_characters: int = 10_000_000
    """Size of the sample of lines that pieces are learned from; memory grows with it, not with the corpus."""

    def __post_init__(self) -> None:
        if self.vocabulary_size < 300:
            raise ValueError(
                f"vocabulary_size {self.vocabulary_size} is too small: 263 are special or bytes, choose 300 or more"
            )
        if self.training_characters < 1:
            raise ValueError(f"training_characters {self.training_characters} hold no text: choose 1 or more")
        if not 0.9 < self.character_coverage <= 1:
            raise ValueError(f"character_coverage {self.character_coverage} is not in (0.9, 1]: choose 0.9995")

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Learns the pieces from the documents (train split alone), or loads them where `folder` is there already.

        The same documents give the same pieces, to the bit. Raises ValueError if the text is too little for them.
        """
        with building(folder) as partial:
            if partial is not None:
                lines = (line for text in texts for line in short_lines(unicode_normalized(text, self.normalization)))
                (partial / "sentencepiece.model").write_bytes(self._learn(sample(lines, self.training_characters)))
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return SentencePieceTokenizer(folder, self.normalization)

    def _learn(self, lines: list[str]) -> bytes:
        if not any(map(str.strip, lines)):
            raise ValueError("there is no text to learn pieces from: the train split of the corpus is empty")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                vocab_size=self.vocabulary_size,
                model_type=self.model_type,
                character_coverage=self.character_coverage,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=1 << 30,
                num_threads=4,  # part of the result: the order in which counts are added
                minloglevel=3,
                pad_id=0,
                pad_piece="<pad>",
                unk_id=1,
                unk_piece="<unk>",
                bos_id=2,
                bos_piece="<s>",
                eos_id=3,
                eos_piece="</s>",
                control_symbols=["<cls>", "<sep>", "<mask>"],
            )
        except RuntimeError as error:
            size = sum(len(line.encode()) for line in lines)
            if most := re.search(r"set it to a value <= (\d+)", str(error)):
                remedy = f"choose at most {most[1]} or give more text"
            elif least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                remedy = f"choose more than {least[1]} or a lower character_coverage"
            else:
                raise
            raise ValueError(
                f"vocabulary_size {self.vocabulary_size} does not fit a training text of {size} bytes: {remedy}"
            ) from None
        return model.getvalue()


class SentencePieceTokenizer:
    """Pieces of single lines, put together.

    The text is normalised to the recorded Unicode form, and "▁" (U+2581, which stands for the space in pieces)
    becomes a space; else nothing is lost: `decode(encode(text).ids)` is that text, with its line ends, tabs and runs
    of spaces. Each line is encoded by itself, so that a word has the same pieces after a line end as after a space,
    and line ends are the byte piece <0x0A>, which no other text can produce.
    """

    def __init__(self, folder: Path, normalization: Normalization) -> None:
        model = (folder / "sentencepiece.model").read_bytes()
        self.folder = folder
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(type(self).__name__, normalization, hashlib.sha256(model).hexdigest())
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        piece = self._processor.piece_to_id
        self.vocabulary = Vocabulary(
            size=self._processor.piece_size(),
            pad=piece("<pad>"),
            unknown=piece("<unk>"),
            begin=piece("<s>"),
            end=piece("</s>"),
            classification=piece("<cls>"),
            separator=piece("<sep>"),
            mask=piece("<mask>"),
        )
        self._line_end = piece("<0x0A>")
        pieces = [self._processor.id_to_piece(index) for index in range(self.vocabulary.size)]
        # A character that is spelled in bytes counts at the first of them, and all stand at its place.
        continues = [self._processor.is_byte(i) and 0x80 <= int(p[1:-1], 16) < 0xC0 for i, p in enumerate(pieces)]
        single = [self._processor.is_byte(index) for index in range(len(pieces))]
        self._lengths = np.array(
            [int(not c) if s else len(p) for p, s, c in zip(pieces, single, continues, strict=True)]
        )
        self._shifts = np.array([p.startswith("▁") - c for p, c in zip(pieces, continues, strict=True)])

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        """Only "▁" is lost: it becomes a space."""
        return unicode_normalized(text, self.normalization).replace("▁", " ")

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """Raises nothing: every text has pieces, an empty one none."""
        text = self.normalize(text)
        lines = text.split("\n")
        pieces = self._processor.encode([line for line in lines if line], out_type="numpy", num_threads=1)
        solid = np.array([bool(line) for line in lines])
        counts = np.zeros(len(lines), np.int64)
        counts[solid] = [len(line) for line in pieces]
        ends = np.cumsum(counts + 1) - 1
        ids = np.empty(ends[-1] + 1, np.int32)
        inside = np.ones(len(ids), bool)
        inside[ends] = False
        ids[ends] = self._line_end
        ids[inside] = np.concatenate([*pieces, np.zeros(0, np.int32)])
        lengths, shifts = self._lengths[ids], self._shifts[ids]
        firsts = (ends - counts)[solid]
        lengths[firsts] -= 1  # the space that SentencePiece puts before a line
        shifts[firsts] = 0
        starts = np.cumsum(lengths) - lengths + shifts
        return Encoding(text, ids[:-1], starts[:-1])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids, np.int32)
        lines = np.split(ids, np.flatnonzero(ids == self._line_end))
        return "\n".join(self._processor.decode(line[line != self._line_end].tolist()) for line in lines)


def short_lines(text: str) -> Iterator[str]:
    """Lines to learn from: white space other than the space ends one too, lest it join two words in a piece; long
    ones are cut at a space, so that any sample of lines is fair."""
    for line in re.split(r"[^\S ]+", text):
        for part in re.finditer(r" ?(.{1,2000}(?= |$)|.{2000})", line):
            yield part[1]


def sample(lines: Iterable[str], characters: int) -> list[str]:
    """All lines, or a fixed uniform sample of them of about so many characters, in order; never holds more."""
    draw = random.Random(0).random
    kept: list[tuple[float, int, str]] = []
    held = 0
    for number, line in enumerate(lines):
        heapq.heappush(kept, (draw(), number, line))
        held += len(line)
        while held > characters:
            held -= len(heapq.heappop(kept)[2])
    return [line for _, _, line in sorted(kept, key=lambda entry: entry[1])]
