"""SentencePiece models that others published, with the ids of the originals: XLNet's, T5's."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from ctx_jax.data import fingerprint
from ctx_jax.data.published import Published, refuse_pieces_of_text, special_vocabulary
from ctx_jax.data.tokenizers import Encoding, Tokenizer, damaged, read_part

MODEL = "spiece.model"
BAR = "▁"
UNKNOWN = "\ufffd"

SPACES_KEPT = b"\x1a\x04\x18\x00\x20\x00"
"""A message that, appended to a model, sets normalizer_spec.add_dummy_prefix and .remove_extra_whitespaces to false."""

AS_IT_IS = b"\x1a\x06\x12\x00\x18\x00\x20\x00"
"""The same, and no normalisation at all."""


@dataclass(frozen=True)
class PublishedPieces(Published):
    """A SentencePiece model with its own normalisation and without byte fallback: spiece.model."""

    xlnet: bool = False
    """Prepare text as XLNet does (zihangdai/xlnet, prepro_utils.py): all of Python's white space is a space, `` and ''
    are quotation marks, and a comma after a digit is a piece of its own."""
    lowercase: bool = False
    """With `xlnet`: lower-case the text."""
    keep_accents: bool = False
    """With `xlnet`: no NFKD and no removal of combining characters."""

    def load(self, folder: Path) -> Tokenizer:
        return PublishedPiecesTokenizer(folder, self)


class PublishedPiecesTokenizer:
    """SentencePiece's own pieces of each line.

    White space is a space, of which runs are one and those around a text are dropped; what the model's own rules drop
    is dropped before words are found. Unknown characters side by side in a word are one unknown token.

    A line is spelled as a whole, for SentencePiece sums in fp32: where two spellings of a word are equally probable,
    what stands before in the line decides. So passages that are cut at line ends have the ids of the whole, and those
    that are cut at a space (in a line longer than half of one) may spell such words otherwise.
    """

    def __init__(self, folder: Path, config: PublishedPieces) -> None:
        model = read_part(folder, MODEL)
        self.folder = folder
        self.config = config
        self.fingerprint = fingerprint(type(self).__name__, config, hashlib.sha256(model).hexdigest())
        try:
            own, self._normalizer, self._processor = (
                sentencepiece.SentencePieceProcessor(model_proto=model and model + message)
                for message in (b"", SPACES_KEPT, AS_IT_IS)
            )
        except RuntimeError:
            raise damaged(folder, MODEL, "it is not a SentencePiece model") from None
        self._list = [*(own.id_to_piece(index) for index in range(len(own))), *config.added]
        self.vocabulary = special_vocabulary(self._list, config, folder)
        spoken = [
            piece
            for index, piece in enumerate(self._list[: len(own)])
            if not own.is_control(index) and not own.is_unknown(index)
        ]
        crossing = [piece for piece in spoken if BAR in piece[1:]]
        for wrong, what in (
            (any(map(own.is_byte, range(len(own)))), "it has byte pieces (byte_fallback)"),
            (bool(crossing), f"piece {crossing[:1]} crosses a space"),
            (own.normalize(" a \n b\t") != f"{BAR}a{BAR}b", "its normalizer keeps white space as it is"),
        ):
            if wrong:
                raise ValueError(f"{folder / MODEL} cannot be used: {what}")
        refuse_pieces_of_text(config, spoken, folder)
        self._ids = {piece: own.piece_to_id(piece) for piece in spoken}
        self._decoded = [piece.replace(BAR, " ") for piece in self._list]
        self._decoded[self.vocabulary.unknown] = UNKNOWN
        for index in self.vocabulary.special:
            self._decoded[index] = ""

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.config)

    def normalize(self, text: str) -> str:
        """The text as the model's rules leave it, U+FFFD for each run of unknown characters in a word."""
        return self.decode(self.encode(text).ids)

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """A passage that goes on within a word has no space before its first piece."""
        first, *rest = map(self._prepared, text.split("\n"))
        spaced = first.startswith(" ") or (not first and bool(rest))
        units = [unit for unit in (first.removeprefix(" "), *(line.removeprefix(" ") for line in rest)) if unit]
        joined = continued and not spaced  # the first piece goes on with a word
        lines = [unit if joined and not number else f" {unit}" for number, unit in enumerate(units)]
        pieces = list(itertools.chain.from_iterable(self._processor.encode(lines, out_type=str, num_threads=1)))
        if self.config.xlnet:
            pieces = [part for piece in pieces for part in self._without_comma(piece)]
        ids = np.fromiter((self._ids.get(piece, self.vocabulary.unknown) for piece in pieces), np.int32, len(pieces))
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        bars = np.fromiter((piece.startswith(BAR) for piece in pieces), np.int64, len(pieces))
        kept = " " * spaced + " ".join(units) if units else ""
        if others := {character for character in set(kept) if character.isspace()} - {" "}:
            kept = kept.translate({ord(character): UNKNOWN for character in others})  # not white space to the model
        return Encoding(kept, ids, np.cumsum(lengths) - lengths + bars - (not spaced and not joined))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out."""
        return "".join([self._decoded[index] for index in np.asarray(ids).tolist()]).removeprefix(" ")

    def piece(self, index: int) -> str:
        return self._list[index]

    def _prepared(self, text: str) -> str:
        """What is spelled of a line: one space between words, one before the first if the line has any."""
        if self.config.xlnet:
            text = " " * text[:1].isspace() + " ".join(text.split()).replace("``", '"').replace("''", '"')
            if not self.config.keep_accents and not text.isascii():
                text = unicodedata.normalize("NFKD", text)
                text = text.translate({ord(c): None for c in set(text) if unicodedata.combining(c)})
            if self.config.lowercase:
                text = text.lower()
        text = self._normalizer.normalize(text).replace(BAR, " ")
        return re.sub(" +", " ", text).rstrip(" ")

    def _without_comma(self, piece: str) -> list[str]:
        """A piece that ends with a digit and a comma is spelled anew without the comma, as a word where it is one."""
        if not (len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()):
            return [piece]
        parts = self._processor.encode(f" {piece[:-1].replace(BAR, '')}", out_type=str)
        if not piece.startswith(BAR):
            parts = [parts[0].removeprefix(BAR), *parts[1:]]
        return [*filter(None, parts), ","]
