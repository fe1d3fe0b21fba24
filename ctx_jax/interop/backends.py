"""tokenizer.json, the file of the `tokenizers` library: what of it we can be, and ours written as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


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
    parts = {name: content.get(name) for name in ("normalizer", "pre_tokenizer")}

    def refuse(component: str, found: Any, remedy: str) -> ValueError:
        return ValueError(f"{file}: {component} {json.dumps(found)[:100]} is not known here: {remedy}")

    def expect(component: str, found: Any, allowed: dict[str, Any]) -> None:
        for name, values in allowed.items():
            if (found or {}).get(name) not in values:
                raise refuse(f"{component} {name}", (found or {}).get(name), f"it must be {values[0]!r}")

    if kind == "WordPiece":
        expect("model", model, {"continuing_subword_prefix": ("##",)})
        expect("pre_tokenizer", parts["pre_tokenizer"], {"type": ("BertPreTokenizer",)})
        expect("normalizer", parts["normalizer"], {"type": ("BertNormalizer",), "clean_text": (True,)})
        normalizer = parts["normalizer"]
        settings = {
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer.get("strip_accents"),
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
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
            expect("normalizer", parts["normalizer"], {"type": ("BertNormalizer",), **bert})
            expect("normalizer", parts["normalizer"], {"handle_chinese_chars": (True,)})
            expect("pre_tokenizer", parts["pre_tokenizer"], {"type": ("BertPreTokenizer",)})
        else:
            expect("model", model, {"end_of_word_suffix": nothing})
            level = {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (True, None)}
            expect("pre_tokenizer", parts["pre_tokenizer"], level)
            if parts["normalizer"] is not None:
                raise refuse("normalizer", parts["normalizer"], "it must be null")
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
