"""Tokenizers of other implementations: their files become tokenizers of ours with the same ids, and ours are written in
their layouts.

    tokenizer = import_tokenizer(Path("bert-base-uncased"), Path("tokenizers/bert"))
    export_tokenizer(tokenizer, Path("mine"))

Which pieces are special is read from the folder, where it says so, else known of the family:

    family                  files                               begin       end         classification, separator
    BERT, DistilBERT        vocab.txt                           [CLS]       [SEP]       [CLS], [SEP]
    OpenAI GPT              vocab.json, merges.txt with </w>    \\n</w>      \\n</w>      \\n</w>
    GPT-2                   vocab.json, merges.txt              <|endoftext|> for all, padding and unknown too
    RoBERTa                 vocab.json, merges.txt              <s>         </s>        <s>, </s>
    Transformer-XL          vocab.bin, .pkl or .txt         <eos>       <eos>       <eos>
    XLNet                   spiece.model                        <eod>       <eod>       <cls>, <sep>
    T5                      spiece.model                        </s>        </s>        </s>

GPT's line end is what it was trained with between paragraphs, and no text becomes it here. What a vocabulary has no
piece for, a mask say, has the id of its end: such a tokenizer does not serve an objective that masks.
"""

from __future__ import annotations

import codecs
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from ctx_jax.data import building
from ctx_jax.data.published import (
    WORD_END,
    Published,
    PublishedByteBPE,
    PublishedWordBPE,
    PublishedWordPiece,
    PublishedWords,
    Special,
)
from ctx_jax.data.published_pieces import MODEL, PublishedPieces
from ctx_jax.data.sentencepieces import MODEL as OWN_MODEL
from ctx_jax.data.symbols import WORDS
from ctx_jax.data.tokenizers import CONFIG, KINDS, SPECIAL, Tokenizer, load_tokenizer, save_config
from ctx_jax.interop.backends import parse_backend, write_backend
from ctx_jax.interop.pickles import read_dictionary
from ctx_jax.serialization import from_json, to_json

OWN = "ctx_jax"
"""The entry of tokenizer_config.json that holds the config of a tokenizer that was trained here."""

TOKENS = {
    "pad": "pad_token",
    "unknown": "unk_token",
    "begin": "bos_token",
    "end": "eos_token",
    "classification": "cls_token",
    "separator": "sep_token",
    "mask": "mask_token",
}
"""What transformers calls the special ids in tokenizer_config.json."""

BERT = {
    "pad": "[PAD]",
    "unknown": "[UNK]",
    "begin": "[CLS]",
    "end": "[SEP]",
    "classification": "[CLS]",
    "separator": "[SEP]",
    "mask": "[MASK]",
}
GPT = {"unknown": "<unk>", "end": "\n</w>"}
ROBERTA = {"pad": "<pad>", "unknown": "<unk>", "begin": "<s>", "end": "</s>", "mask": "<mask>"}
GPT2 = {"unknown": "<|endoftext|>", "end": "<|endoftext|>"}
WORDS_OF_LINES = {"unknown": "<unk>", "end": "<eos>"}
PIECES = {**ROBERTA, "classification": "<cls>", "separator": "<sep>"}


def import_tokenizer(folder: Path, output: Path, lowercase: bool | None = None) -> Tokenizer:
    """Makes `output`, a folder of ours, of the tokenizer's files in a folder of Hugging Face's or of the original
    layout, and loads it; where `output` is there already, it is loaded alone.

    `lowercase` says whether the model is uncased, whatever tokenizer_config.json says; where neither does, the pieces
    of a vocab.txt tell, and XLNet is cased. A word of vocab.txt is known up to 200 characters as in the original, or
    100 where the folder is of Hugging Face's layout, as there.

    Raises FileNotFoundError if there is no tokenizer, ValueError, naming the component, if it is of a kind that is not
    known here.
    """
    folder = Path(folder)
    with building(Path(output)) as partial:
        if partial is not None:
            files, config = recognise(folder, lowercase)
            for name, content in files.items():
                (partial / name).write_bytes(content)
            save_config(config, partial)
            try:  # what is unsound is an error before the folder is there
                config.load(partial)
            except ValueError as error:
                what = str(error).replace(str(partial), str(folder)).removesuffix("; delete the folder")
                raise ValueError(what) from None
    return load_tokenizer(Path(output))


@dataclass(frozen=True)
class Files:
    """What stands in a folder beside the vocabulary."""

    folder: Path
    settings: dict[str, Any]
    """tokenizer_config.json."""
    model: str
    """What the folder says that the tokenizer's or the model's class is; "" where it does not."""
    names: dict[str, str]
    """The special pieces that the folder names, by our names."""

    def special(
        self, pieces: list[str], family: Mapping[str, str], lossless: bool = False
    ) -> tuple[Special, tuple[str, ...]]:
        """The special pieces, and those that are not in the files but come after them. Where no text is unknown
        (`lossless`), nothing need stand for it."""
        added = self._added(pieces)
        known = {*pieces, *added}

        def choose(kind: str, *instead: str) -> str:
            for piece in (self.names.get(kind), family.get(kind), *instead):
                if piece in known:
                    return str(piece)
            raise ValueError(
                f"the tokenizer in {self.folder} has no piece for {TOKENS[kind]} ({family.get(kind)!r}): name one in "
                f"tokenizer_config.json"
            )

        end = choose("end")
        begin = choose("begin", end)
        special = Special(
            pad=choose("pad", end),
            unknown=choose("unknown", *([end] if lossless else [])),
            begin=begin,
            end=end,
            classification=choose("classification", begin),
            separator=choose("separator", end),
            mask=choose("mask", end),
        )
        return special, added

    def _added(self, pieces: list[str]) -> tuple[str, ...]:
        """Pieces that only tokenizer_config.json or added_tokens.json names, in the order of their ids."""
        entries = {int(index): entry for index, entry in self.settings.get("added_tokens_decoder", {}).items()}
        for content, index in read_json(self.folder / "added_tokens.json", {}).items():
            entries.setdefault(index, {"content": content, "special": True})
        here = set(pieces)
        fresh = {index: entry for index, entry in sorted(entries.items()) if entry["content"] not in here}
        for number, (index, entry) in enumerate(fresh.items(), len(pieces)):
            if index != number or not entry.get("special", False):
                raise ValueError(
                    f"{self.folder}: added token {entry['content']!r} with id {index} cannot be used: only special "
                    f"ones that follow the {len(pieces)} pieces can"
                )
        return tuple(entry["content"] for entry in fresh.values())


def recognise(folder: Path, lowercase: bool | None) -> tuple[dict[str, bytes], Any]:
    """The files of our tokenizer and its config."""
    settings = read_json(folder / "tokenizer_config.json", {})
    if (own := own_config(settings.get(OWN))) is not None:
        found = [folder / name for name in ("vocab.txt", "vocab.json", "merges.txt", OWN_MODEL)]
        return {file.name: file.read_bytes() for file in found if file.is_file()}, own
    named = {**settings, **read_json(folder / "special_tokens_map.json", {})}
    contents = {kind: content_of(named.get(name)) for kind, name in TOKENS.items()}
    model = settings.get("tokenizer_class") or read_json(folder / CONFIG, {}).get("model_type") or ""
    about = Files(folder, settings, model.lower(), {k: piece for k, piece in contents.items() if piece})
    if about.model.startswith("transfo"):
        return words(about)
    if (folder / "vocab.txt").is_file():
        return wordpiece(about, (folder / "vocab.txt").read_bytes(), lowercase)
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return byte_pairs(about, (folder / vocabulary).read_bytes(), (folder / merges).read_bytes())
    if (folder / MODEL).is_file():
        return sentence_pieces(about, (folder / MODEL).read_bytes(), lowercase)
    if (folder / "tokenizer.json").is_file():
        backend = parse_backend(read_json(folder / "tokenizer.json", None), folder / "tokenizer.json")
        about.settings.update(backend.settings)
        if backend.merges is None:
            return wordpiece(about, backend.vocabulary, lowercase)
        return byte_pairs(about, backend.vocabulary, backend.merges)
    raise FileNotFoundError(
        f"no tokenizer in {folder}: it needs vocab.txt, vocab.json with merges.txt, {MODEL} or tokenizer.json"
    )


def wordpiece(about: Files, content: bytes, lowercase: bool | None) -> tuple[dict[str, bytes], Published]:
    if content.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{about.folder / 'vocab.txt'} begins with a byte-order mark, which its first piece has not")
    pieces = [line.strip() for line in content.decode(errors="replace").removesuffix("\n").split("\n")]
    special, added = about.special(pieces, BERT)
    settings = about.settings
    if lowercase is None:
        lowercase = settings.get("do_lower_case")
    if lowercase is None:
        capitals = sum(p != p.lower() for p in pieces if not (p.startswith("[") and p.endswith("]")))
        lowercase = capitals <= len(pieces) // 100  # an uncased vocabulary may hold a stray one
    accents = settings.get("strip_accents")
    layout = any((about.folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    config = PublishedWordPiece(
        vocabulary_size=len(pieces) + len(added),
        special=special,
        added=added,
        lowercase=bool(lowercase),
        strip_accents=bool(lowercase if accents is None else accents),
        chinese=bool(settings.get("tokenize_chinese_chars", True)),
        longest_word=int(settings.get("max_input_chars_per_word", 100 if layout else 200)),
    )
    return {"vocab.txt": content}, config


def byte_pairs(about: Files, vocabulary: bytes, merges: bytes) -> tuple[dict[str, bytes], Published]:
    try:
        ids = json.loads(vocabulary)
        pieces = sorted(ids, key=ids.__getitem__)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"the vocabulary in {about.folder} is not a JSON object of pieces and ids") from None
    words = any(piece.endswith(WORD_END) for piece in pieces)
    if about.settings.get("add_prefix_space"):
        raise ValueError(f"{about.folder}: add_prefix_space is not known here: no space is put before a text")
    family = GPT if words else GPT2 if "<|endoftext|>" in ids and "<s>" not in ids else ROBERTA
    special, added = about.special(pieces, family, lossless=not words)
    config = (PublishedWordBPE if words else PublishedByteBPE)(len(pieces) + len(added), special, added)
    return {"vocab.json": vocabulary, "merges.txt": merges}, config


def words(about: Files) -> tuple[dict[str, bytes], Published]:
    """Transformer-XL's vocabulary: a pickle of its class's fields, or a word a line."""
    pickled = [about.folder / name for name in ("vocab.bin", "vocab.pkl") if (about.folder / name).is_file()]
    plain = about.folder / "vocab.txt"
    if pickled:
        found = read_dictionary(pickled[0])
        pieces, lowercase = found.get("idx2sym"), bool(found.get("lower_case", False))
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise ValueError(f"{pickled[0]} is no vocabulary of Transformer-XL: it has no list of words, idx2sym")
    elif plain.is_file():
        lines = plain.read_text(encoding="utf-8").split("\n")
        pieces, lowercase = [line.split()[0] for line in lines if line.split()], False
    else:
        raise FileNotFoundError(
            f"no tokenizer in {about.folder}: Transformer-XL's is vocab.bin, vocab.pkl or vocab.txt"
        )
    special, added = about.special(pieces, WORDS_OF_LINES)
    config = PublishedWords(len(pieces) + len(added), special, added, lowercase)
    return {WORDS: json.dumps([*pieces, *added], indent=0).encode()}, config


def sentence_pieces(about: Files, content: bytes, lowercase: bool | None) -> tuple[dict[str, bytes], Published]:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise ValueError(f"{about.folder / MODEL} is not a SentencePiece model") from None
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    xlnet = about.model.startswith(("xlnet", "albert")) or (not about.model and "<eod>" in pieces)
    about.names["unknown"] = pieces[processor.unk_id()]
    if xlnet and "<eod>" in pieces:  # what ends a document, whatever ends a sequence
        about.names.update(begin="<eod>", end="<eod>")
    special, added = about.special(pieces, PIECES)
    config = PublishedPieces(
        vocabulary_size=len(pieces) + len(added),
        special=special,
        added=added,
        xlnet=xlnet,
        lowercase=xlnet and bool(about.settings.get("do_lower_case", False) if lowercase is None else lowercase),
        keep_accents=xlnet and bool(about.settings.get("keep_accents", False)),
    )
    return {MODEL: content}, config


SHAPES = {"tokenizer_class": str, "model_type": str, "added_tokens_decoder": dict, "max_input_chars_per_word": int}
"""What fields must be, where they are."""


def read_json(file: Path, default: Any) -> Any:
    """A JSON object, or the default where there is no file."""
    if not file.is_file():
        return default
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object")
    for name, kind in SHAPES.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{file}: {name} {found[name]!r} is no {kind.__name__}: mend it, or delete the line")
    return found


def content_of(token: Any) -> str | None:
    """A token, which may stand alone or with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str | None):
        raise ValueError(f"{content!r} among the special tokens is no text: mend tokenizer_config.json")
    return content


def export_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer into a folder, which may be there already, as transformers loads it.

    Those that were trained here are written with what `import_tokenizer` needs to make the same of them again; literal
    special tokens are special to transformers, and text to us.

    Raises ValueError for a kind that transformers has nothing for.
    """
    folder = Path(folder)
    own = own_config(json.loads((tokenizer.folder / CONFIG).read_text()))
    made = write_backend(tokenizer)
    settings: dict[str, Any] = {"tokenizer_class": made.kind, **made.settings, **shown(tokenizer, made.kind)}
    if own is not None:
        settings[OWN] = to_json(own)
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.folder.iterdir():
        if file.name != CONFIG:
            shutil.copyfile(file, folder / file.name)
    if made.content is not None:
        (folder / "tokenizer.json").write_text(made.content, encoding="utf-8")
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def shown(tokenizer: Tokenizer, kind: str) -> dict[str, str]:
    """The special pieces by transformers' names, but for those that only stand for what the vocabulary lacks."""
    vocabulary = tokenizer.vocabulary
    pieces = {name: tokenizer.piece(getattr(vocabulary, name)) for name in SPECIAL}
    if kind == "RobertaTokenizer":
        kept = [*pieces]
    elif kind in ("GPT2Tokenizer", "T5Tokenizer"):
        kept = [name for name in pieces if name in ("unknown", "end") or pieces[name] != pieces["end"]]
        kept += ["begin"] * (kind == "GPT2Tokenizer" and "begin" not in kept)
    else:
        instead = {"begin": "classification", "end": "separator"}
        kept = [name for name in pieces if pieces[name] != pieces.get(instead.get(name, ""))]
        if pieces["end"] in ("<eod>", GPT["end"]):  # transformers has no name for these
            kept = [name for name in kept if name == "unknown" or pieces[name] != pieces["end"]]
    return {TOKENS[name]: pieces[name] for name in kept}


def own_config(found: Any) -> Any:
    """The config of a kind that is trained here, or None. Nothing else is made of what a folder says."""
    types = {kind["type"] for kind in KINDS.values()}
    return from_json(found) if isinstance(found, dict) and found.get("type") in types else None
