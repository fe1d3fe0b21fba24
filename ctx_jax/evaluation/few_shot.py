"""Tasks put to a language model as text, without training on them (GPT-3: Brown et al. 2020, arXiv 2005.14165, section
2.4), and the last word of a passage (LAMBADA: Paperno et al. 2016, arXiv 1606.06031).

    items -> prompts -> (context, continuation) -> tokens -> batches of equal length -> log P(continuation | context)

An item is a line of JSON, {"context": "Q: 1 + 1? A:", "choices": [" 2", " 3"], "answer": 0}, or {"text": "..."}, whose
last word is to be found. Texts are joined as they are, so a choice that is a word of its own begins with its space. An
item with one choice counts as right if each of its tokens is the most probable one.

A likelihood depends on nothing but its two texts: the row is padded to a length that follows from its own.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ctx_jax.contract import Batch, Variables
from ctx_jax.data.examples import lengths
from ctx_jax.data.files import text_files
from ctx_jax.data.jsonl import json_object, without_halves
from ctx_jax.data.lines import lines
from ctx_jax.data.tokenizers import utf8_size
from ctx_jax.objectives import predict
from ctx_jax.objectives.causal import Causal
from ctx_jax.parallel.sharding import batch_sharding, replicated
from ctx_jax.progress import counted, tell
from ctx_jax.runs import Trained, divisible_rows, open_run
from ctx_jax.training.metrics import Diverged
from ctx_jax.training.step import on_mesh
from ctx_jax.transfer.inputs import LENGTH
from ctx_jax.transfer.texts import own_options

LAST_WORD = re.compile(r"(.*\S)(\s+\S+)\s*", re.DOTALL)


class Item(NamedTuple):
    """One question."""

    context: str
    choices: tuple[str, ...]
    """What may follow the context; of one alone, whether the model would say it is asked."""
    answer: int
    """Which of the choices is right, from 0."""

    @property
    def solved(self) -> str:
        return self.context + self.choices[self.answer]


class Likelihood(NamedTuple):
    """Of a continuation after its context."""

    total: float
    """log P(continuation | context) in nats."""
    tokens: int
    """Tokens of the continuation."""
    greedy: bool
    """Whether each of them is the most probable one."""


@dataclass(frozen=True)
class Shots:
    """What stands before an item's context."""

    shots: int = 0
    """solved items of --examples before each item, drawn afresh for each"""
    seed: int = 0
    """which are drawn"""
    delimiter: str = "\n\n"
    """what stands between them"""
    description: str = ""
    """what stands before all of them"""

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ValueError(f"--shots {self.shots} is negative: choose 0 or more")

    def prompt(self, item: Item, number: int, examples: Sequence[Item]) -> str:
        """Description, examples and the item's context; the item itself is none of its examples.

        Raises ValueError for too few examples.
        """
        chance = np.random.default_rng((self.seed, number))
        order = chance.permutation(len(examples)) if self.shots else ()
        chosen = list(islice((examples[i].solved for i in order if examples[i] != item), self.shots))
        if len(chosen) < self.shots:
            raise ValueError(f"--shots {self.shots} are more than the {len(chosen)} other items of --examples")
        return self.delimiter.join([*([self.description] if self.description else []), *chosen, item.context])


def items(path: str) -> list[Item]:
    """The items in a file of JSON lines (or a folder or glob of them). Raises ValueError naming file and line."""
    found = []
    for file in text_files(path):
        for number, line in lines(file, "strict"):
            if line.strip():
                found.append(item(line, f"{file} line {number}"))
    if not found:
        raise ValueError(f"there is no item in {path}: give one a line")
    return found


def item(line: str, where: str) -> Item:
    """One line. Raises ValueError for what is no item."""
    entry = json_object(line, where, '{"context": ..., "choices": ..., "answer": 0}')
    without_halves(json.dumps(entry, ensure_ascii=False), where, "strict")
    if isinstance(text := entry.get("text"), str):
        words = LAST_WORD.fullmatch(text)
        if words is None:
            raise ValueError(f"{where} has fewer than two words in its text: none is left to predict from")
        return Item(words[1], (words[2],), 0)
    context, choices, answer = (entry.get(name) for name in Item._fields)
    if not isinstance(context, str):
        raise ValueError(f"{where} has no text and no context: give one of them as a string")
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c.strip() for c in choices)):
        raise ValueError(f"{where} has choices {choices!r}: give one or more strings that are not blank")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"{where} has answer {answer!r}: give the number of a choice, from 0 to {len(choices) - 1}")
    return Item(context, tuple(choices), answer)


class Row(NamedTuple):
    """What is read, and what its last positions should predict."""

    tokens: list[int]
    targets: list[int]


def padded(rows: Sequence[Row], size: int, length: int, targets: int, pad: int) -> Batch:
    """A prepared batch of [size, length], of which so many `targets` in a row are predicted at most."""
    names = ("tokens", "documents", "positions")
    batch: Batch = {name: np.zeros((size, length), np.int32) for name in names}
    batch["tokens"][:] = pad
    batch |= {name: np.zeros((size, targets), np.int32) for name in ("targets", "target_positions")}
    batch["target_weights"] = np.zeros((size, targets), np.float32)
    for number, row in enumerate(rows):
        n, k = len(row.tokens), len(row.targets)
        for name, value in zip(names, (row.tokens, 1, np.arange(n)), strict=True):
            batch[name][number, :n] = value
        batch["targets"][number, :k], batch["target_weights"][number, :k] = row.targets, 1
        batch["target_positions"][number, :k] = np.arange(n - k, n)
    return batch


def scores(model: Any, variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Of each target [B, K]: its negative log-likelihood, and whether it is the most probable token."""
    _, found = predict(model, variables, batch, None, None)
    return found.nll, found.best == batch["targets"]


class Scorer:
    """Log-likelihoods by a run's checkpoint."""

    def __init__(self, run: Trained, length: int | None = None, batch_size: int = 32) -> None:
        """
        Args:
            length: tokens that are read at once; None = as many as the model has positions for, or 512. Of what is
                longer, the beginning of the context is left out.

        Raises ValueError for a model that gives no text a probability, or has fewer positions.
        """
        config, objective = run.experiment.model, run.experiment.objective
        if not isinstance(objective, Causal):
            raise ValueError(
                f"a run of {type(objective).__name__} gives no text a probability: choose one of Causal or Segment"
            )
        longest = getattr(config, "max_length", None)
        if length is not None and length < 1:
            raise ValueError(f"--length {length} is not a number of tokens: choose 1 or more")
        if length is not None and longest is not None and length > longest:
            raise ValueError(
                f"--length {length} is longer than the model's {longest} positions: choose {longest} or less"
            )
        if batch_size < 1:
            raise ValueError(f"--batch-size {batch_size} is not a number of rows: choose 1 or more")
        self.run, self.length = run, length or longest or LENGTH
        self.cut = 0
        """Contexts so far whose beginning was left out."""
        self._size = divisible_rows(run.mesh, batch_size)
        self._step = jax.jit(on_mesh(run.mesh, partial(scores, run.model)), out_shardings=replicated(run.mesh))

    def __call__(self, texts: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Of each (context, continuation); equal ones are computed once.

        Raises ValueError for a continuation that has no token, or more than fit.
        """
        numbers: dict[tuple[str, str], int] = {}
        for pair in texts:
            numbers.setdefault(pair, len(numbers))
        found = self.likelihoods([self._row(*self.encode(*pair)) for pair in numbers])
        return [found[numbers[pair]] for pair in texts]

    def rolling(self, text: str) -> Likelihood:
        """Of a whole text: each token once, in windows one after the other, of which the last begins earlier."""
        ids = [self.run.tokenizer.vocabulary.begin, *self.run.tokenizer.encode(text).ids.tolist()]
        rows = []
        for start in range(0, len(ids) - 1, self.length):
            end = min(start + self.length, len(ids) - 1)
            rows.append(Row(ids[max(0, end - self.length) : end], ids[start + 1 : end + 1]))
        found = self.likelihoods(rows)
        total = math.fsum(each.total for each in found)
        return Likelihood(total, len(ids) - 1, all(each.greedy for each in found))

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Their tokens, as those of one text: what the tokenizer joins across the border belongs to the continuation.

        Raises ValueError if nothing does.
        """
        tokenizer = self.run.tokenizer
        before, whole = tokenizer.encode(context).ids, tokenizer.encode(context + continuation).ids
        shorter = min(len(before), len(whole))
        differ = np.flatnonzero(before[:shorter] != whole[:shorter])
        border = int(differ[0]) if len(differ) else shorter
        if border == len(whole):
            raise ValueError(f"{continuation!r} after {context[-40:]!r} has no token of its own: give it more text")
        return whole[:border].tolist(), whole[border:].tolist()

    def _row(self, context: list[int], continuation: list[int]) -> Row:
        if len(continuation) > self.length:
            text = self.run.tokenizer.decode(continuation)
            raise ValueError(
                f"{text[:40]!r} is {len(continuation)} tokens, more than the {self.length} read: shorten it"
            )
        ids = [self.run.tokenizer.vocabulary.begin, *context, *continuation]
        self.cut += len(ids) > self.length + 1
        return Row(ids[-self.length - 1 : -1], continuation)

    def likelihoods(self, rows: Sequence[Row]) -> list[Likelihood]:
        """Of the targets of each row."""
        found: dict[int, Likelihood] = {}
        sharding, pad = batch_sharding(self.run.mesh), self.run.tokenizer.vocabulary.pad

        def collect(group: list[int], result: tuple[jax.Array, jax.Array]) -> None:
            for number, nll, best in zip(group, *jax.device_get(result), strict=False):
                n = len(rows[number].targets)
                found[number] = Likelihood(-math.fsum(nll[:n].tolist()), n, bool(best[:n].all()))
                if not math.isfinite(found[number].total):
                    raise Diverged(f"a log-likelihood is {found[number].total}: go back to an earlier checkpoint")

        groups, waiting = list(self._groups(rows)), None
        for length, targets, group in counted("scoring", groups, len(groups)):
            batch = padded([rows[number] for number in group], self._size, length, targets, pad)
            result = self._step(self.run.variables, jax.device_put(batch, sharding))
            if waiting is not None:
                collect(*waiting)  # one behind, while the device computes the next
            waiting = group, result
        if waiting is not None:
            collect(*waiting)
        return [found[number] for number in range(len(rows))]

    def _groups(self, rows: Sequence[Row]) -> Iterator[tuple[int, int, list[int]]]:
        """Rows of about equal length, by number: (length, targets in a row, rows), of few lengths and targets."""
        borders = lengths(self.length)
        alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            length, targets = (borders[int(np.searchsorted(borders, len(part)))] for part in row)
            alike[length, targets].append(number)
        for (length, targets), numbers in sorted(alike.items()):
            for start in range(0, len(numbers), self._size):
                yield length, targets, numbers[start : start + self._size]


def evaluate(
    path: Path,
    source: str,
    shots: Shots = Shots(),
    *,
    examples: str | None = None,
    unconditional: str = "Answer: ",
    checkpoint: str = "last",
    length: int | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """How many of the items in `source` a checkpoint of a run solves.

    Args:
        examples: items to draw solved ones from (may be `source`).
        unconditional: what a choice stands after where its own likelihood is asked for.
        length, batch_size: as `Scorer`; checkpoint: as `runs.open_run`.

    Returns {"run", "step", "input", "items", "shots", "cut"} and `choosing` or, for items of one choice, `last_words`.
    """
    with own_options():
        questions = items(source)
        solved = () if examples is None else items(examples)
    if shots.shots and not solved:
        raise ValueError(f"--shots {shots.shots} are to be drawn from nowhere: name a file of solved items, --examples")
    open_ended = sum(len(question.choices) == 1 for question in questions)
    if 0 < open_ended < len(questions):
        raise ValueError(f"{source} has {open_ended} items of one choice and others of several: make two files of it")
    prompts = [shots.prompt(question, number, solved) for number, question in enumerate(questions)]
    run = open_run(path, checkpoint)
    scorer = Scorer(run, length, batch_size)
    if open_ended:
        found = last_words(scorer, questions, prompts)
    else:
        found = choosing(scorer, questions, prompts, unconditional)
    if scorer.cut:
        tell(
            f"note: {scorer.cut:,} texts are longer than {scorer.length} tokens: they were read without their beginning"
        )
    about = {"run": str(path), "step": run.step, "input": source, "items": len(questions), "shots": shots.shots}
    return {**about, "cut": scorer.cut, **found}


def last_words(scorer: Scorer, questions: Sequence[Item], prompts: Sequence[str]) -> dict[str, Any]:
    """Of items with one choice: {"accuracy", "standard_error", "perplexity" of a whole choice}."""
    found = scorer([(prompt, question.choices[0]) for prompt, question in zip(prompts, questions, strict=True)])
    surprise = -statistics.fmean(each.total for each in found)
    return {**accuracy([each.greedy for each in found]), "perplexity": math.exp(surprise) if surprise < 700 else None}


def choosing(scorer: Scorer, questions: Sequence[Item], prompts: Sequence[str], unconditional: str) -> dict[str, Any]:
    """Of items with several choices, {"chance": accuracy of a guess} and, by the name of each way to compare
    log P(choice | prompt), {"accuracy", "standard_error"} where the highest is chosen:

    sum             as it is
    token           by the number of its tokens (GPT-3 in most tasks)
    byte            by its bytes in UTF-8, which compares tokenizers
    unconditional   less log P(choice | `unconditional`) (GPT-3 in ARC, OpenBookQA and RACE)
    """
    asked = [
        (prompt, choice) for prompt, question in zip(prompts, questions, strict=True) for choice in question.choices
    ]
    alone = [(unconditional.rstrip() if choice[0].isspace() else unconditional, choice) for _, choice in asked]
    found = scorer([*asked, *alone])
    after, before = iter(found[: len(asked)]), iter(found[len(asked) :])
    right: dict[str, list[bool]] = {"sum": [], "token": [], "byte": [], "unconditional": []}
    for question in questions:
        values: dict[str, list[float]] = {name: [] for name in right}
        for choice in question.choices:
            likelihood = next(after)
            values["sum"].append(likelihood.total)
            values["token"].append(likelihood.total / likelihood.tokens)
            values["byte"].append(likelihood.total / utf8_size(choice))
            values["unconditional"].append(likelihood.total - next(before).total)
        for name, of_choices in values.items():
            right[name].append(int(np.argmax(of_choices)) == question.answer)
    chance = statistics.fmean(1 / len(question.choices) for question in questions)
    return {"chance": chance, **{name: accuracy(solved) for name, solved in right.items()}}


def accuracy(right: Sequence[bool]) -> dict[str, float]:
    """{"accuracy", "standard_error"}."""
    mean = statistics.fmean(right)
    return {"accuracy": mean, "standard_error": math.sqrt(mean * (1 - mean) / max(1, len(right) - 1))}
