"""The other side of `finetune:tagging`: a plain PyTorch loop of the same recipe, on transformers' model.

    python -P experiments/benchmarks/peers_tagging.py MODEL train.conll test.conll --seed 0

MODEL is a folder of transformers (all-MiniLM-L6-v2, for one); the files have a word, a tab and a tag in each line and a
blank line after each sentence, and may be gzipped. AdamW with weight decay 0.01, batches of 32, warm-up over a tenth of
the steps, linear decay, dropout 0.1; a word's tag is that of its first piece. Nothing is clipped.

Needs torch and transformers, which nothing else here does. Prints one JSON line: the F1 of the test file's entities
(seqeval's, and its strict one by IOB2) of the last step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
from seqeval.metrics import f1_score
from seqeval.scheme import IOB2
from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]

BATCH, LONGEST, DROPOUT, DECAY, WARM_UP = 32, 128, 0.1, 0.01, 0.1
IGNORED = -100
"""PyTorch's class of what has no loss."""


class Sentence(NamedTuple):
    """A sentence's pieces, the class of each (IGNORED but for a word's first), the first pieces' places, the tags."""

    pieces: list[int]
    classes: list[int]
    first: list[int]
    tags: list[str]


def sentences(path: Path) -> list[tuple[list[str], list[str]]]:
    """Words and tags of each sentence."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        blocks = "".join(line if line.strip() else "\n" for line in file).split("\n\n")
    rows = [[line.split("\t") for line in block.strip("\n").split("\n")] for block in blocks if block.strip("\n")]
    return [([row[0] for row in each], [row[-1].strip() for row in each]) for each in rows]


def encoded(tokenizer: Any, words: list[str], tags: list[str], classes: dict[str, int]) -> Sentence:
    result = tokenizer(words, is_split_into_words=True, truncation=True, max_length=LONGEST)
    of_word = result.word_ids()
    first = [n for n, word in enumerate(of_word) if word is not None and word != of_word[n - 1]]
    wanted = [IGNORED] * len(of_word)
    for n in first:
        wanted[n] = classes.get(tags[of_word[n]], IGNORED)
    return Sentence(result["input_ids"], wanted, first, tags)


def padded(rows: list[list[int]], filler: int, device: str) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows], device=device)


class Tagger(torch.nn.Module):
    """The model and a linear layer on each piece's last state."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(
            folder, add_pooling_layer=False, hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT
        )
        self.dropout = torch.nn.Dropout(DROPOUT)
        self.head = torch.nn.Linear(self.body.config.hidden_size, classes)

    def forward(self, batch: list[Sentence], device: str) -> torch.Tensor:
        """[B, T, classes]"""
        pieces = padded([each.pieces for each in batch], 0, device)
        present = padded([[1] * len(each.pieces) for each in batch], 0, device)
        states = self.body(input_ids=pieces, attention_mask=present).last_hidden_state
        return self.head(self.dropout(states))


@torch.no_grad()
def predicted(model: Tagger, data: list[Sentence], names: list[str], device: str) -> list[list[str]]:
    """The tags of each sentence; words beyond LONGEST have none."""
    found = []
    for start in range(0, len(data), BATCH):
        batch = data[start : start + BATCH]
        for sentence, best in zip(batch, model(batch, device).argmax(-1).tolist(), strict=True):
            tags = [names[best[n]] for n in sentence.first]
            found.append(tags + ["O"] * (len(sentence.tags) - len(tags)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, help="stop after so many, to try the script")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    shuffled = random.Random(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train = sentences(options.train)
    names = sorted({tag for _, tags in train for tag in tags})
    classes = {name: n for n, name in enumerate(names)}
    data = [encoded(tokenizer, *each, classes) for each in train]
    test = [encoded(tokenizer, *each, classes) for each in sentences(options.test)]

    model = Tagger(options.model, len(names)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=DECAY)
    steps = options.epochs * -(-len(data) // BATCH)
    warm = int(WARM_UP * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / warm if step < warm else (steps - step) / (steps - warm)
    )
    start, step = time.perf_counter(), 0
    for _ in range(options.epochs):
        shuffled.shuffle(data)
        for first in range(0, len(data), BATCH):
            if step == options.steps:
                break
            batch = data[first : first + BATCH]
            wanted = padded([each.classes for each in batch], IGNORED, device)
            loss = torch.nn.functional.cross_entropy(model(batch, device).flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
    model.eval()
    tags, found = [each.tags for each in test], predicted(model, test, names, device)
    line = {
        "seed": options.seed,
        "steps": step,
        "f1": f1_score(tags, found),
        "strict_f1": f1_score(tags, found, mode="strict", scheme=IOB2),
        "seconds": round(time.perf_counter() - start, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
