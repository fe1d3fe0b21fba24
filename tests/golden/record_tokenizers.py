"""Records the ids that the original tokenizers give to hard lines, for tests that run without them.

BERT's tokenization.py and GPT-2's encoder.py are read from clones of google-research/bert and openai/gpt-2, of which
nothing is kept; GPT-2's needs the package `regex`. Without --data the small records in golden/tokenizers are written,
with it real/tokenizers.json: a key of the ids of each 500 of 50,000 lines.

    python -m tests.golden.record_tokenizers --bert BERT --gpt2 GPT2 [--data DATA [--minilm FOLDER]]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.subwords import ByteLevelBPE, byte_letters
from tests.golden.hard_lines import PARTS, data_lines, derived_vocabulary, digests, hard_lines, read

HERE = Path(__file__).parent / "tokenizers"
LINES = 300
Encode = Callable[[str], list[int]]


def load(file: Path, **modules: types.ModuleType) -> types.ModuleType:
    """A module of another project, with stand-ins for what it imports."""
    sys.modules.update(modules)
    module = types.ModuleType(file.stem)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module


def bert(clone: Path, vocabulary: Path, lowercase: bool) -> Encode:
    six, tensorflow = types.ModuleType("six"), types.ModuleType("tensorflow")
    six.PY3, six.PY2 = True, False  # pyright: ignore[reportAttributeAccessIssue]
    tensorflow.gfile = types.SimpleNamespace(GFile=Path.open)  # pyright: ignore[reportAttributeAccessIssue]
    module = load(clone / "tokenization.py", six=six, tensorflow=tensorflow)
    tokenizer = module.FullTokenizer(vocabulary, do_lower_case=lowercase)
    return lambda text: tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))


def gpt2(clone: Path, vocabulary: str, merges: str) -> Encode:
    pairs = [tuple(line.split()) for line in merges.split("\n")[1:-1]]
    return load(clone / "src" / "encoder.py").Encoder(json.loads(vocabulary), pairs).encode


def small_files() -> None:
    """The vocabularies of the small records."""
    (HERE / "bert").mkdir(parents=True, exist_ok=True)
    pieces = derived_vocabulary([*PARTS, *(part.lower() for part in PARTS)], size=400)
    (HERE / "bert" / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    (HERE / "gpt2").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        speech = next(documents(Sotu().passages("train")))
        made = ByteLevelBPE(vocabulary_size=700).train([speech, *hard_lines(200, seed=2)], Path(folder) / "made")
        merges = (made.folder / "merges.txt").read_text(encoding="utf-8")
    pairs = [line.replace(" ", "") for line in merges.split("\n")[1:-1]]
    pieces = [*byte_letters(), *dict.fromkeys(pairs), "<|endoftext|>"]
    (HERE / "gpt2" / "merges.txt").write_text(merges, encoding="utf-8")
    ids = {piece: index for index, piece in enumerate(pieces)}
    (HERE / "gpt2" / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bert", "gpt2"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("data", "minilm"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    if options.data is None:
        small_files()
        gpt2_files = [(HERE / "gpt2" / name).read_text(encoding="utf-8") for name in ("vocab.json", "merges.txt")]
        encoders = {
            "bert_uncased": bert(options.bert, HERE / "bert" / "vocab.txt", True),
            "bert_cased": bert(options.bert, HERE / "bert" / "vocab.txt", False),
            "gpt2": gpt2(options.gpt2, *gpt2_files),
        }
        ids = {name: [encode(line) for line in hard_lines(LINES)] for name, encode in encoders.items()}
        (HERE / "ids.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")
        return
    lines = data_lines(options.data)
    file = HERE.parent.parent / "real" / "tokenizers.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("".join(f"{piece}\n" for piece in derived_vocabulary(lines)), encoding="utf-8")
        encoders = {
            "gpt2": gpt2(
                options.gpt2, *(read(options.data, f"vocab/gpt2.{name}") for name in ("vocab.json", "merges.txt"))
            ),
            "bert_uncased": bert(options.bert, vocabulary, True),
            "bert_cased": bert(options.bert, vocabulary, False),
        }
        if options.minilm is not None:
            encoders["minilm"] = bert(options.bert, options.minilm / "vocab.txt", True)
        found |= {name: digests([encode(line) for line in lines]) for name, encode in encoders.items()}
    file.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
