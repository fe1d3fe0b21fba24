"""tokenizer.json, the file of the `tokenizers` library: what of it we can be, and ours written as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from ctx_jax.data.published import (
    WORD_END,
    PublishedByteBPETokenizer,
    PublishedWordBPETokenizer,
    PublishedWordPieceTokenizer,
)
from ctx_jax.data.published_pieces import PublishedPiecesTokenizer
from ctx_jax.data.sentencepieces import MODEL, SentencePieceTokenizer
from ctx_jax.data.subwords import LONGEST_WORD, ByteLevelBPETokenizer, WordPieceTokenizer, read_merges
from ctx_jax.data.tokenizers import Tokenizer

FAST = "PreTrainedTokenizerFast"
"""transformers' class for whatever tokenizer.json says."""


class Backend(NamedTuple):
    """A tokenizer.json in the files that it could have been."""

    vocabulary: bytes
    """vocab.txt where there are no merges, else vocab.json."""
    merges: bytes | None
    """merges.txt."""
    settings: dict[str, Any]
    """What tokenizer_config.json would say."""


def parse_backend(content: dict[str, Any], file: Path) -> Backend:
    """Raises ValueError, naming the component, for what no tokenizer of ours does."""
    model = content.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    normalizer, pre_tokenizer = content.get("normalizer"), content.get("pre_tokenizer")

    def refuse(component: str, found: Any, remedy: str) -> ValueError:
        return ValueError(f"{file}: {component} {json.dumps(found)[:100]} is not known here: {remedy}")

    def expect(component: str, found: Any, allowed: dict[str, Any]) -> None:
        for name, values in allowed.items():
            if (found or {}).get(name) not in values:
                raise refuse(f"{component} {name}", (found or {}).get(name), f"it must be {values[0]!r}")

    if kind == "WordPiece":
        expect("model", model, {"continuing_subword_prefix": ("##",)})
        expect("pre_tokenizer", pre_tokenizer, {"type": ("BertPreTokenizer",)})
        expect("normalizer", normalizer, {"type": ("BertNormalizer",), "clean_text": (True,)})
        rules = normalizer or {}
        settings = {
            "do_lower_case": rules.get("lowercase", True),
            "strip_accents": rules.get("strip_accents"),
            "tokenize_chinese_chars": rules.get("handle_chinese_chars", True),
            "max_input_chars_per_word": model.get("max_input_chars_per_word", 100),
        }
        pieces = in_order(model["vocab"], file)
        return Backend("".join(f"{piece}\n" for piece in pieces).encode(), None, settings | added(content))
    if kind == "BPE":
        nothing = (None, "", False)
        plain = {"dropout": nothing, "continuing_subword_prefix": nothing, "byte_fallback": nothing}
        expect("model", model, {**plain, "ignore_merges": nothing, "fuse_unk": nothing})
        if model.get("end_of_word_suffix") == "</w>":
            bert = {"lowercase": (True,), "strip_accents": (None, True), "clean_text": (True,)}
            expect("normalizer", normalizer, {"type": ("BertNormalizer",), **bert})
            expect("normalizer", normalizer, {"handle_chinese_chars": (True,)})
            expect("pre_tokenizer", pre_tokenizer, {"type": ("BertPreTokenizer",)})
        else:
            expect("model", model, {"end_of_word_suffix": nothing})
            level = {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (True, None)}
            expect("pre_tokenizer", pre_tokenizer, level)
            if normalizer is not None:
                raise refuse("normalizer", normalizer, "it must be null")
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        vocabulary = json.dumps(model["vocab"], ensure_ascii=False).encode()
        return Backend(vocabulary, "".join(f"{pair}\n" for pair in ["#version: 0.2", *pairs]).encode(), added(content))
    raise refuse("model", kind, "give spiece.model" if kind == "Unigram" else "it must be WordPiece or BPE")


def in_order(ids: dict[str, int], file: Path) -> list[str]:
    pieces = sorted(ids, key=ids.__getitem__)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise ValueError(f"{file}: model vocab has gaps: its ids must be 0, 1, 2, ...")
    return pieces


def added(content: dict[str, Any]) -> dict[str, Any]:
    """The added tokens as tokenizer_config.json has them."""
    entries = content.get("added_tokens") or []
    return {"added_tokens_decoder": {str(entry["id"]): entry for entry in entries}}


class Written(NamedTuple):
    """What transformers needs of a tokenizer, beside its vocabulary and the special pieces."""

    kind: str
    """Its class there."""
    content: str | None
    """tokenizer.json, if that class needs it."""
    settings: dict[str, Any]
    """More of tokenizer_config.json."""


def write_backend(tokenizer: Tokenizer) -> Written:
    """Raises ValueError for a kind that neither transformers nor its library has anything for."""
    match tokenizer:
        case PublishedWordPieceTokenizer(config=config):
            ids = {tokenizer.piece(index): index for index in range(config.vocabulary_size - len(config.added))}
            made = bert_words(
                models.WordPiece(ids, unk_token=config.special.unknown, max_input_chars_per_word=config.longest_word),
                [bert(config.lowercase, config.strip_accents, config.chinese)],
            )
            settings = {
                "do_lower_case": config.lowercase,
                "strip_accents": config.strip_accents,
                "tokenize_chinese_chars": config.chinese,
            }
            if config.longest_word != LONGEST_WORD:
                settings["max_input_chars_per_word"] = config.longest_word
            frame(made, tokenizer, "{0} $A {1}", "{0} $A {1} $B:1 {1}:1")
            kind = "BertTokenizer" if config.longest_word == LONGEST_WORD else FAST
            return Written(kind, finished(made, tokenizer), settings)
        case WordPieceTokenizer():
            ids = {tokenizer.piece(index): index for index in range(tokenizer.vocabulary.size)}
            before = [normalizers.Replace(Regex("[\x0b\x0c\x1c-\x1f\x85]"), " "), *form(tokenizer.normalization)]
            unknown = tokenizer.piece(tokenizer.vocabulary.unknown)
            model = models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD)
            made = bert_words(model, [*before, bert(tokenizer.lowercase, tokenizer.lowercase, True)])
            frame(made, tokenizer, "{0} $A {1}", "{0} $A {1} $B:1 {1}:1")
            return Written(FAST, finished(made, tokenizer), {})
        case PublishedWordBPETokenizer():
            ids = json.loads((tokenizer.folder / "vocab.json").read_bytes())
            unknown = tokenizer.piece(tokenizer.vocabulary.unknown)
            model = models.BPE(ids, read_merges(tokenizer.folder), unk_token=unknown, end_of_word_suffix=WORD_END)
            made = bert_words(model, [bert(True, True, True)])
            made.decoder = decoders.BPEDecoder(suffix=WORD_END)
            return Written("OpenAIGPTTokenizer", finished(made, tokenizer, boundary=False), {})
        case ByteLevelBPETokenizer():
            ids = json.loads((tokenizer.folder / "vocab.json").read_bytes())
            made = tokenizers.Tokenizer(models.BPE(ids, read_merges(tokenizer.folder)))
            if forms := form(tokenizer.normalization):
                made.normalizer = forms[0]
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            vocabulary = tokenizer.vocabulary
            roberta = isinstance(tokenizer, PublishedByteBPETokenizer) and vocabulary.begin != vocabulary.end
            if roberta:
                frame(made, tokenizer, "{0} $A {1}", "{0} $A {1} {1} $B {1}")
            kind = "RobertaTokenizer" if roberta else FAST if forms else "GPT2Tokenizer"
            return Written(kind, finished(made, tokenizer), {"add_prefix_space": False})
        case PublishedPiecesTokenizer(config=config):
            if config.xlnet:
                names = {"do_lower_case": config.lowercase, "keep_accents": config.keep_accents, "remove_space": True}
                return Written("XLNetTokenizer", None, names)
            return Written("T5Tokenizer", None, {"extra_ids": 0} | added_entries(tokenizer, config.added))
        case SentencePieceTokenizer():
            return Written(FAST, finished(own_pieces(tokenizer), tokenizer), {})
    raise ValueError(
        f"{type(tokenizer).__name__} {tokenizer.folder} cannot be exported: transformers has nothing like it"
    )


def bert(lowercase: bool, strip_accents: bool, chinese: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )


def form(normalization: str) -> list[normalizers.Normalizer]:
    return [] if normalization == "none" else [getattr(normalizers, normalization)()]


def bert_words(model: models.Model, before: list[normalizers.Normalizer]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.normalizer = before[0] if len(before) == 1 else normalizers.Sequence(before)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##")
    return made


def frame(made: tokenizers.Tokenizer, tokenizer: Tokenizer, single: str, pair: str) -> None:
    """Sets which special tokens stand around one text and two."""
    vocabulary = tokenizer.vocabulary
    ids = (vocabulary.classification, vocabulary.separator)
    pieces = [tokenizer.piece(index) for index in ids]
    made.post_processor = processors.TemplateProcessing(
        single=single.format(*pieces), pair=pair.format(*pieces), special_tokens=[*zip(pieces, ids, strict=True)]
    )


def finished(made: tokenizers.Tokenizer, tokenizer: Tokenizer, boundary: bool = True) -> str:
    """tokenizer.json, with the special pieces among its added tokens."""
    vocabulary = tokenizer.vocabulary
    special = {vocabulary.unknown, *(vocabulary.special if boundary else ())}
    special |= set(range(made.get_vocab_size(), vocabulary.size))
    pieces = [tokenizer.piece(index) for index in sorted(special)]
    made.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in pieces])
    return made.to_str(pretty=True)


def added_entries(tokenizer: Tokenizer, pieces: tuple[str, ...]) -> dict[str, Any]:
    first = tokenizer.vocabulary.size - len(pieces)
    entries = {str(index): {"content": piece, "special": True} for index, piece in enumerate(pieces, first)}
    return {"added_tokens_decoder": entries} if entries else {}


def own_pieces(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """A SentencePiece model that was trained here: each line begins with a space that is not in the text, pieces never
    cross a space, line ends are bytes. The sign for a space, should the text have it, is a space here."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / MODEL))
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    ids = {piece: index for index, piece in enumerate(pieces)}
    unknown = tokenizer.vocabulary.unknown
    text = [
        index
        for index in range(len(pieces))
        if not (processor.is_byte(index) or processor.is_control(index) or index == unknown)
    ]
    if from_merges(processor, text):
        merges = []
        for index in sorted(text, key=lambda index: -processor.get_score(index)):
            piece = pieces[index]
            merges += [
                (piece[:cut], piece[cut:])
                for cut in range(1, len(piece))
                if ids.get(piece[:cut]) in text and ids.get(piece[cut:]) in text
            ]
        model = models.BPE(ids, merges, unk_token=pieces[unknown], byte_fallback=True, fuse_unk=True)
    else:
        scores = [(piece, processor.get_score(index)) for index, piece in enumerate(pieces)]
        model = models.Unigram(scores, unk_id=unknown, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    mark = "\ufdd0"  # a code point that is in no text
    made.normalizer = normalizers.Sequence(
        [
            *form(tokenizer.normalization),
            normalizers.Replace("\n", f"\n{mark}"),
            normalizers.Prepend(mark),
            normalizers.Replace(Regex(f"{mark}(?=\n|$)"), ""),
            normalizers.Replace(mark, "▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Split("▁", "merged_with_next")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def from_merges(processor: Any, text: list[int]) -> bool:
    """Whether a model is of byte pairs: the scores of its pieces are then their ranks."""
    return all(processor.get_score(index) == round(processor.get_score(index)) for index in text)
