"""The comparison of tokenizers with transformers, live: it must load what we export, and give the same ids.

Texts with literal special tokens are left out: to transformers they are special. Where transformers itself differs from
the original on a line (it knows other Unicode versions and lower-cases single characters), the number of lines says so:
at most --allowed of them may. With --xlnet, a clone of zihangdai/xlnet, its own code is compared too.

    python -m tests.golden.parity_tokenizers [--seed N] [--allowed N] [--xlnet XLNET]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import transformers

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.interop.tokenizers import export_tokenizer, import_tokenizer
from tests.golden.hard_lines import SPECIAL, hard_lines
from tests.golden.published import FAMILIES, write_family
from tests.golden.record_tokenizers import load

OWN = {
    "wordpiece": WordPiece(vocabulary_size=800),
    "wordpiece_cased": WordPiece(vocabulary_size=800, lowercase=False),
    "byte_bpe": ByteLevelBPE(vocabulary_size=800),
    "byte_bpe_nfc": ByteLevelBPE(vocabulary_size=800, normalization="NFC"),
    "unigram": SentencePiece(vocabulary_size=800),
    "bpe": SentencePiece(vocabulary_size=800, model_type="bpe"),
}


def differing(ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]], lines: list[str]) -> list[str]:
    return [line for line in lines if ours(line) != theirs(line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--allowed", type=float, default=0.02, help="part of the lines")
    parser.add_argument("--xlnet", type=Path)
    options = parser.parse_args()
    lines = [line for line in hard_lines(options.lines, options.seed) if not any(part in line for part in SPECIAL)]
    failed = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))
        made: dict[str, Tokenizer] = {}
        for family in FAMILIES:
            write_family(family, root / family)
            made[family] = import_tokenizer(root / family, root / f"{family}-ours")
        for kind, config in OWN.items():
            made[kind] = config.train(iter(speeches), root / f"{kind}-ours")
        for kind, tokenizer in made.items():
            export_tokenizer(tokenizer, root / f"{kind}-theirs")
            theirs = transformers.AutoTokenizer.from_pretrained(root / f"{kind}-theirs")
            again = import_tokenizer(root / f"{kind}-theirs", root / f"{kind}-again")

            def encode(text: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
                return tokenizer.encode(text).ids.tolist()

            different = differing(encode, lambda text, to=theirs: to.encode(text, add_special_tokens=False), lines)
            returned = differing(encode, lambda text, to=again: to.encode(text).ids.tolist(), lines)
            same = again.vocabulary == tokenizer.vocabulary and not returned
            print(f"{kind:16} {type(theirs).__name__:20} differs in {len(different)} of {len(lines)}; back: {same}")
            for line in different[:2]:
                print(f"    {json.dumps(line)[:150]}")
            if not same or len(different) > options.allowed * len(lines):
                failed.append(kind)
        if options.xlnet is not None:
            six = types.ModuleType("six")
            six.PY3, six.PY2 = True, False  # pyright: ignore[reportAttributeAccessIssue]
            original = load(options.xlnet / "prepro_utils.py", six=six)
            model = io.BytesIO((root / "xlnet" / "spiece.model").read_bytes())
            own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
            ours = made["xlnet"]
            different = differing(
                lambda text: ours.encode(text).ids.tolist(),
                lambda text: original.encode_ids(own, original.preprocess_text(text)),
                hard_lines(options.lines, options.seed),
            )
            print(f"xlnet's own code: differs in {len(different)}")
            failed += ["xlnet's own code"] * bool(different)
    if failed:
        raise SystemExit(f"not equal: {', '.join(failed)}")


if __name__ == "__main__":
    main()
