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
from ctx_jax.data.tokenizers import (
    MOST_IDS,
    PIECES,
    SPECIAL,
    Encoding,
    Memo,
    Normalization,
    Tokenizer,
    damaged,
    read_part,
    save_config,
    unicode_normalized,
)

MODEL = "sentencepiece.model"

SMALLEST = 300
"""Pieces, at least."""

BYTES = ("<0x0A>", "<0xE2>", "<0x96>", "<0x81>")
"""The pieces of a line end and of the character "▁"."""


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
        if self.vocabulary_size > MOST_IDS:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} is too large: choose at most {MOST_IDS}")
        if self.vocabulary_size < SMALLEST:
            raise ValueError(
                f"vocabulary_size {self.vocabulary_size} is too small: 263 are special or bytes, "
                f"choose {SMALLEST} or more"
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
                (partial / MODEL).write_bytes(self._learn(sample(lines, self.training_characters)))
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
                pad_id=SPECIAL["pad"],
                pad_piece=PIECES["pad"],
                unk_id=SPECIAL["unknown"],
                unk_piece=PIECES["unknown"],
                bos_id=SPECIAL["begin"],
                bos_piece=PIECES["begin"],
                eos_id=SPECIAL["end"],
                eos_piece=PIECES["end"],
                control_symbols=[PIECES[name] for name in ("classification", "separator", "mask")],
            )
        except RuntimeError as error:
            size = sum(len(line.encode()) for line in lines)
            if most := re.search(r"set it to a value <= (\d+)", str(error)):
                remedy = (f"choose at most {most[1]} or " if int(most[1]) >= SMALLEST else "") + "give more text"
            elif least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                remedy = f"choose more than {least[1]} or a lower character_coverage"
            else:
                raise
            raise ValueError(
                f"vocabulary_size {self.vocabulary_size} does not fit a training text of {size} bytes: {remedy}"
            ) from None
        return model.getvalue()


class SentencePieceTokenizer:
    """Pieces of single words, put together.

    Nothing is lost: `decode(encode(text).ids)` is the text in the recorded Unicode form, with its line ends, tabs and
    runs of spaces. Pieces never cross a space, so each word is encoded by itself: its pieces depend on nothing else (in
    a long line SentencePiece's own sums in fp32 would), and are the same after a line end as after a space. Line ends
    are the byte piece <0x0A>, which no other text can produce; "▁" (U+2581), which stands for the space in pieces, is
    spelled in bytes.
    """

    def __init__(self, folder: Path, normalization: Normalization) -> None:
        model = read_part(folder, MODEL)
        self.folder = folder
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(type(self).__name__, normalization, hashlib.sha256(model).hexdigest())
        try:
            # The message appended sets normalizer_spec.add_dummy_prefix to false: the space is added here.
            processor = sentencepiece.SentencePieceProcessor(model_proto=model and model + b"\x1a\x02\x18\x00")
        except RuntimeError:
            raise damaged(folder, MODEL, "it is not a SentencePiece model") from None
        pieces = [processor.id_to_piece(index) for index in range(len(processor))]
        special = {name: pieces.index(piece) for name, piece in PIECES.items() if piece in pieces}
        if len(special) < len(PIECES) or not all(map(processor.is_byte, map(processor.piece_to_id, BYTES))):
            raise damaged(folder, MODEL, "special ids or bytes are missing")
        self.vocabulary = Vocabulary(size=len(pieces), **special)
        self._processor = processor
        self._memo = Memo(lambda word: self._pieces(" " + word))
        self._line_end, *self._bar = map(processor.piece_to_id, BYTES)
        self._line_break = np.int32(self._line_end).tobytes()
        single = [processor.is_byte(index) for index in range(len(pieces))]
        self._bytes = [
            bytes([int(piece[1:-1], 16)]) if is_byte else piece.replace("▁", " ").encode()
            for piece, is_byte in zip(pieces, single, strict=True)
        ]
        for index in self.vocabulary.special:
            self._bytes[index] = b""
        # A character that is spelled in bytes counts at the first of them, and all stand at its place.
        rest = np.array([s and 0x80 <= b[0] < 0xC0 for s, b in zip(single, self._bytes, strict=True)])
        self._lengths = np.where(single, ~rest, [len(piece) for piece in pieces])
        self._shifts = np.array([int(piece.startswith("▁")) for piece in pieces]) - rest - self._lengths

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        return unicode_normalized(text, self.normalization)

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """Raises nothing: every text has pieces, an empty one none."""
        text = self.normalize(text)
        first, *lines = text.split("\n")
        within = continued and first != ""
        words = self._memo.joined  # of a run of spaces, each but the last has an empty word before it
        head = self._rest_of_line(first) if within else words(first and first.split(" "))
        encoded = [head, *[words(line and line.split(" ")) for line in lines]]
        ids = np.frombuffer(self._line_break.join(encoded), np.int32)
        # Each line's first piece has a space that is not in the text.
        joined = np.empty(len(ids), bool)
        np.equal(ids[:-1], self._line_end, out=joined[1:])
        joined[:1] = not within
        joined &= ids != self._line_end
        starts = np.cumsum(self._lengths[ids] - joined)
        return Encoding(text, ids, starts + self._shifts[ids])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out; bytes that are not UTF-8 become U+FFFD."""
        text = b"".join([self._bytes[index] for index in np.asarray(ids).tolist()]).decode(errors="replace")
        return text.removeprefix(" ").replace("\n ", "\n")

    def piece(self, index: int) -> str:
        return self._processor.id_to_piece(index)

    def _rest_of_line(self, line: str) -> bytes:
        """The first word has no space before it but what the text itself says."""
        first, *words = line.split(" ")
        return np.array(self._pieces(first), np.int32).tobytes() + self._memo.joined(words)

    def _pieces(self, text: str) -> list[int]:
        first, *rest = text.split("▁")
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._bar + self._processor.encode(part)
        return ids


def short_lines(text: str) -> Iterator[str]:
    """Lines to learn from: white space other than the space ends one too, lest it join two words in a piece, and so
    does the sign for a space; long ones are cut at a space, so that any sample of lines is fair."""
    for line in re.split(r"(?:[^\S ]|▁)+", text):
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
