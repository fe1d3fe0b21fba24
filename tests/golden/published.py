"""Small folders of published tokenizers, as their authors or Hugging Face lay them out."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import sentencepiece

from ctx_jax.data.corpora import Sotu, documents
from tests.golden.hard_lines import PARTS

HERE = Path(__file__).parent / "tokenizers"
FAMILIES = ("bert", "bert_cased", "gpt", "gpt2", "roberta", "xlnet", "xlnet_uncased", "t5")


def write_family(family: str, folder: Path) -> None:
    """Makes the folder of a family."""
    folder.mkdir(parents=True)
    settings: dict[str, object] = {}
    match family:
        case "bert" | "bert_cased":
            shutil.copyfile(HERE / "bert" / "vocab.txt", folder / "vocab.txt")
            settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": family == "bert"}
        case "gpt2":
            for name in ("vocab.json", "merges.txt"):
                shutil.copyfile(HERE / "gpt2" / name, folder / name)
        case "roberta":
            pieces = [*json.loads((HERE / "gpt2" / "vocab.json").read_text(encoding="utf-8"))][:-1]
            pieces = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "madeupword0000", "<mask>"]
            write_pairs(folder, pieces, (HERE / "gpt2" / "merges.txt").read_text(encoding="utf-8"))
            settings = {"tokenizer_class": "RobertaTokenizer"}
        case "gpt":
            pairs = (
                "t h|th e</w>|o f</w>|i n|in g</w>|a n|an d</w>|o u|p e|pe o|l e</w>|p le</w>|peo ple</w>|9 9|. .</w>"
            )
            characters = [*dict.fromkeys(c for part in PARTS for c in part.lower() if c.isprintable() and c != " ")][
                ::2
            ]
            letters = [*dict.fromkeys([*"abcdefghijklmnopqrstuvwxyz0123456789.,'", *characters])]
            joined = [pair.replace(" ", "") for pair in pairs.split("|")]
            ends = [f"{letter}</w>" for letter in letters]
            write_pairs(folder, ["<unk>", *letters, *ends, "\n</w>", *joined], "#version\n" + pairs.replace("|", "\n"))
            settings = {"tokenizer_class": "OpenAIGPTTokenizer", "unk_token": "<unk>"}
        case "xlnet" | "xlnet_uncased":
            control = "<cls> <sep> <pad> <mask> <eod>".split()
            user = ["<eop>", ".", "(", ")", '"', "-", "\u2013", "£", "€"]
            write_model(folder, control_symbols=control, user_defined_symbols=user)
            settings = {"tokenizer_class": "XLNetTokenizer", "do_lower_case": family == "xlnet_uncased"}
        case "t5":
            write_model(folder, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
            settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_pairs(folder: Path, pieces: list[str], merges: str) -> None:
    ids = {piece: index for index, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "merges.txt").write_text(merges.removesuffix("\n") + "\n", encoding="utf-8")


def write_model(folder: Path, **settings: object) -> None:
    text = next(documents(Sotu().passages("train")))
    lines = [*text.split("\n"), *(["1999, 2000, 9, 12,345", 'He said: "é ü" 日本 aaaa zzz', " ".join(PARTS[:60])] * 5)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=500, minloglevel=3, **settings
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
