"""Pieces of words as other libraries make them: WordPiece and byte-level byte-pair encoding.

The `tokenizers` library learns the pieces and encodes single words; what a word is, and where its tokens stand, is
decided here. Special tokens are not among the library's "added tokens", so text never becomes one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

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
    counted,
    damaged,
    read_part,
    save_config,
    unicode_normalized,
)

LONGEST_WORD = 100
"""Characters of a word that WordPiece knows, at most; BERT's."""

BERT_PIECES = dict(zip(SPECIAL, ("[PAD]", "[UNK]", "[BOS]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"), strict=True))
"""What stands for the special ids in vocab.txt. Text never matches: brackets are words of their own."""

HAN = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002f800-\U0002fa1f]"
)
"""The characters that are words for BERT."""

SPLIT = re.compile(r" ?[\S\x1c-\x1f]+|[^\S\x1c-\x1f]+(?=[^\S\x1c-\x1f][\S\x1c-\x1f])|[^\S\x1c-\x1f]+")
"""Parts of a text that byte-level pieces never cross: a word with the space before it, or white space. Of white space
before a word, the last character is not with the others. Four control characters are white space for Python alone."""


@dataclass(frozen=True)
class WordPiece:
    """WordPiece (Wu et al. 2016, arXiv 1609.08144, section 4.1) as BERT uses it (Devlin et al. 2019, arXiv 1810.04805):
    punctuation and CJK characters are words, control characters are dropped, a word is spelled in the longest pieces
    from the left, or is unknown as a whole. The pieces are learned by byte-pair encoding."""

    vocabulary_size: int = 30_522
    """Pieces, the 7 special ids included."""
    lowercase: bool = True
    """Lower-case the text and take off accents, as BERT's uncased models do."""
    normalization: Normalization = "NFC"
    """Unicode normalisation of all text, in training and in use."""
    character_coverage: float = 0.9995
    """The part of the training text's characters that get pieces; a word with any other is unknown."""

    def __post_init__(self) -> None:
        if self.vocabulary_size > MOST_IDS:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} is too large: choose at most {MOST_IDS}")
        if self.vocabulary_size < 9:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} is too small: 7 are special, choose 100 or more")
        if not 0.9 < self.character_coverage <= 1:
            raise ValueError(f"character_coverage {self.character_coverage} is not in (0.9, 1]: choose 0.9995")

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Learns the pieces from the words of the texts, or loads them where `folder` is there already. Raises
        ValueError if the text is too little for them."""
        with building(folder) as partial:
            if partial is not None:
                pieces = self._learn(unicode_normalized(text, self.normalization) for text in texts)
                (partial / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return WordPieceTokenizer(folder, self.lowercase, self.normalization)

    def _learn(self, texts: Iterable[str]) -> list[str]:
        basic = bert_words(self.lowercase, {})
        counts: Counter[str] = Counter()
        for word, count in counted(lambda text: HAN.sub(r" \g<0> ", text).split(), texts).items():
            for part in split_bert(basic, word):
                if len(part) <= LONGEST_WORD:
                    counts[part] += count
        characters = covering(counts, self.character_coverage)
        counts = Counter({word: count for word, count in counts.items() if characters.issuperset(word)})
        known, inside = sorted(characters), sorted(set().union(*(word[1:] for word in counts)))
        # Given as special tokens, they get their ids first and in this order; the library's own is random.
        alphabet = [*BERT_PIECES.values(), *known, *(f"##{character}" for character in inside)]
        model = models.WordPiece({}, unk_token=BERT_PIECES["unknown"])
        trainer = trainers.WordPieceTrainer(
            vocab_size=self.vocabulary_size, min_frequency=2, show_progress=False, special_tokens=alphabet
        )
        pieces = learn(counts, model, trainer, self.vocabulary_size, len(alphabet), " or a lower character_coverage")
        return sorted(pieces, key=pieces.__getitem__)


class WordPieceTokenizer:
    """Pieces of words. All white space separates words, also the control characters among it that BERT would drop; a
    word of nothing but what is dropped has no token."""

    def __init__(self, folder: Path, lowercase: bool, normalization: Normalization) -> None:
        content = read_part(folder, "vocab.txt")
        self.folder = folder
        self.lowercase = lowercase
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(
            type(self).__name__, lowercase, normalization, hashlib.sha256(content).hexdigest()
        )
        try:
            self._pieces = content.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise damaged(folder, "vocab.txt", "it is not UTF-8") from None
        ids = {piece: index for index, piece in enumerate(self._pieces)}
        self.vocabulary = find_special(ids, BERT_PIECES, folder, "vocab.txt")
        self._words = bert_words(lowercase, ids)
        self._memo = Memo(self._encode_word)

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.lowercase, self.normalization)

    def normalize(self, text: str) -> str:
        """The words with a space between them, "[UNK]" for an unknown one."""
        unknown = [BERT_PIECES["unknown"]]
        parts = (part for word in self._unicode(text).split() for part in split_bert(self._words, word))
        return " ".join(
            unknown[0] if [token.value for token in self._words.model.tokenize(part)] == unknown else part
            for part in parts
        )

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing: where a passage was cut within a word, its parts are two."""
        return self._memo.encoding(self._unicode(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Words with a space between them; special ids are left out."""
        special = set(self.vocabulary.special)
        pieces = [self._pieces[index] for index in np.asarray(ids).tolist() if index not in special]
        return "".join(piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces).removeprefix(" ")

    def piece(self, index: int) -> str:
        return self._pieces[index]

    def _unicode(self, text: str) -> str:
        return unicode_normalized(text, self.normalization)

    def _encode_word(self, word: str) -> list[int]:
        """The id and the place in the word of each token; the first is at its start even if characters were dropped."""
        encoding = self._words.encode(word, add_special_tokens=False)
        places = [0, *(start for start, _ in encoding.offsets[1:])]
        return list(itertools.chain.from_iterable(zip(encoding.ids, places, strict=False)))


@dataclass(frozen=True)
class ByteLevelBPE:
    """Byte-pair encoding of UTF-8 bytes (Radford et al. 2019, GPT-2, section 2.2), with GPT-2's rule for where pieces
    end. No text is unknown."""

    vocabulary_size: int = 50_257
    """Pieces, the 7 special ids and 256 bytes included."""
    normalization: Normalization = "none"
    """Unicode normalisation of all text, in training and in use."""

    def __post_init__(self) -> None:
        if self.vocabulary_size > MOST_IDS:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} is too large: choose at most {MOST_IDS}")
        if self.vocabulary_size < 264:
            raise ValueError(
                f"vocabulary_size {self.vocabulary_size} is too small: 263 are special or bytes, choose 300 or more"
            )

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Learns the pieces from the words of the texts, or loads them where `folder` is there already. Raises
        ValueError if the text is too little for them."""
        with building(folder) as partial:
            if partial is not None:
                save(self._learn(unicode_normalized(text, self.normalization) for text in texts), partial)
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return ByteLevelBPETokenizer(folder, self.normalization)

    def _learn(self, texts: Iterable[str]) -> models.Model:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)

        def split(text: str) -> Iterator[str]:
            for word in SPLIT.findall(re.sub("[\x1c-\x1f]", "\n", text)):  # lest a piece hold two words
                if len(word) <= 20:
                    yield word
                    continue
                for _, (start, end) in level.pre_tokenize_str(word):  # scripts without spaces
                    for place in range(start, end, LONGEST_WORD):
                        yield word[place : min(end, place + LONGEST_WORD)]

        counts: Counter[str] = Counter()
        for word, count in counted(split, texts).items():
            for part, _ in level.pre_tokenize_str(word):
                counts[part] += count
        model = models.BPE()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=list(PIECES.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        learn(counts, model, trainer, self.vocabulary_size, 263)
        return model


class ByteLevelBPETokenizer:
    """Pieces of bytes. Nothing is lost but what Unicode normalisation changes."""

    def __init__(
        self,
        folder: Path,
        normalization: Normalization,
        special: Mapping[str, str] = PIECES,
        added: Sequence[str] = (),
    ) -> None:
        vocabulary, merges = read_part(folder, "vocab.json"), read_merges(folder)
        self.folder = folder
        self.normalization: Normalization = normalization
        contents = (vocabulary, read_part(folder, "merges.txt"))
        self.fingerprint = fingerprint(
            type(self).__name__,
            normalization,
            *(hashlib.sha256(part).hexdigest() for part in contents),
            *([] if special is PIECES else [[*special.items()], added]),
        )
        try:
            ids = json.loads(vocabulary)
            ids |= {piece: index for index, piece in enumerate(added, len(ids))}
            model = models.BPE(ids, merges)
            letters = byte_letters()
            texts = {
                index: bytes(letters[letter] for letter in piece)
                for piece, index in ids.items()
                if piece not in special.values() and piece not in added
            }
        except Exception as error:  # the library raises nothing narrower
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            raise damaged(folder, "vocab.json or merges.txt", what) from None
        self.vocabulary = find_special(ids, special, folder, "vocab.json")
        self._words = tokenizers.Tokenizer(model)
        self._words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._memo = Memo(lambda word: self._words.encode(word, add_special_tokens=False).ids)
        self._bytes = [texts.get(index, b"") for index in range(self.vocabulary.size)]
        self._pieces = {index: piece for piece, index in ids.items()}
        self._lengths = np.array([len(piece) for piece in self._bytes])
        self._spaces = np.array([piece.startswith(b" ") for piece in self._bytes])

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        return unicode_normalized(text, self.normalization)

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing."""
        text = self.normalize(text)
        ids = np.frombuffer(self._memo.joined(SPLIT.findall(text)), np.int32)
        lengths = self._lengths[ids]
        starts = np.cumsum(lengths) - lengths
        if not text.isascii():
            starts = byte_characters(text)[starts]
        return Encoding(text, ids, starts + self._spaces[ids])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self._bytes[index] for index in np.asarray(ids).tolist()]).decode(errors="replace")

    def piece(self, index: int) -> str:
        return self._pieces[index]


def read_merges(folder: Path) -> list[tuple[str, str]]:
    """The pairs in merges.txt, in their order."""
    try:
        lines = read_part(folder, "merges.txt").decode().split("\n")
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        return [(first, second) for first, second in pairs]
    except ValueError as error:
        raise damaged(folder, "vocab.json or merges.txt", str(error)) from None


def learn(
    counts: Mapping[str, int], model: models.Model, trainer: Any, size: int, least: int, remedy: str = ""
) -> dict[str, int]:
    """The pieces of `size` that `trainer` finds for `model` in words with their counts, each with its id."""
    if not counts:
        raise ValueError("there is no text to learn pieces from: the train split of the corpus is empty")

    def repeated() -> Iterator[str]:  # the library counts for itself; the order of what it sees is part of the result
        for word, count in sorted(counts.items()):
            for start in range(0, count, 4096):
                yield f"{word} " * min(4096, count - start)

    where = f"vocabulary_size {size} does not fit the {len(counts)} words of the training text"
    if size <= least:
        raise ValueError(f"{where}: choose more than {least}{remedy}")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(repeated(), trainer)
    pieces = words.get_vocab(with_added_tokens=True)
    if len(pieces) < size:
        most = f"choose at most {len(pieces)} or " if len(pieces) > least else ""
        raise ValueError(f"{where}: {most}give more text")
    return pieces


def save(model: models.Model, folder: Path) -> None:
    """Writes the model's files. Raises OSError: the library's own error has no type, but the system's number in it."""
    try:
        model.save(str(folder))
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise


def find_special(ids: Mapping[str, int], pieces: Mapping[str, str], folder: Path, name: str) -> Vocabulary:
    """The vocabulary of these pieces, the special ones among them."""
    if sorted(ids.values()) != list(range(len(ids))):
        raise damaged(folder, name, "its ids are not 0, 1, 2, ...")
    missing = [piece for piece in pieces.values() if piece not in ids]
    if missing:
        raise damaged(folder, name, f"{missing[0]} is missing")
    return Vocabulary(size=len(ids), **{kind: ids[pieces[kind]] for kind in SPECIAL})


def bert_words(lowercase: bool, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """BERT's cleaning and its words, in pieces of these ids."""
    words = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=BERT_PIECES["unknown"], max_input_chars_per_word=LONGEST_WORD)
    )
    words.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return words


def split_bert(words: tokenizers.Tokenizer, word: str) -> list[str]:
    """What BERT makes of a word between white space: a list of words, without pieces yet."""
    return [part for part, _ in words.pre_tokenizer.pre_tokenize_str(words.normalizer.normalize_str(word))]


def covering(counts: Mapping[str, int], coverage: float) -> set[str]:
    """The most frequent characters of these words that together make up this part of them."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    left = coverage * sum(characters.values())
    chosen = set()
    for character, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if left <= 0:
            break
        chosen.add(character)
        left -= count
    return chosen


def byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable characters of Latin-1 stand for themselves, the rest for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def byte_characters(text: str) -> np.ndarray:
    """[bytes of UTF-8 + 1] int64: the character that each byte belongs to."""
    codes = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.cumsum((codes & 0xC0) != 0x80) - 1, len(text))
