"""Questions whose answers are spans of a text: SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, arXiv 1606.05250; 2018, arXiv
1806.03822), in their JSON, scored as by their own scripts.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from scipy.special import softmax

from ctx_jax.contract import Batch
from ctx_jax.data.examples import ExampleStore, Outputs, by_row
from ctx_jax.data.files import Errors, read
from ctx_jax.data.jsonl import without_halves
from ctx_jax.data.offsets import Located, Speller
from ctx_jax.evaluation.files import Encoded, Encoder, FileTask, check_room
from ctx_jax.transfer.inputs import Part, Template

if TYPE_CHECKING:
    from ctx_jax.data.files import File

LONGEST_QUESTION = 64
"""Tokens of a question, at most, and at most half of a row's: what is more is cut off (run_squad.py of BERT)."""

ID = re.compile(r'"id"\s*:\s*')


class Answer(NamedTuple):
    """A part of a context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question, the text in which its answer is, and the answers that people gave: none if the text has none."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    article: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.context, self.question)


class Window(NamedTuple):
    """A part of a question's context as a row."""

    question: int
    tokens: slice
    """Of the context."""
    place: int
    """Where the first of these stands in the row."""
    best: np.ndarray
    """[tokens] bool: those that have the most context in this window; an answer may start there alone."""


class Candidate(NamedTuple):
    """An answer that a model gives: the sum of the logits of its start and end."""

    text: str
    score: float
    probability: float


class Said(NamedTuple):
    """What a model says of a question: the best answers, no two the same, and how much better none would be."""

    best: list[Candidate]
    null: float


@dataclass(frozen=True, eq=False)
class SpanStore(ExampleStore):
    """Questions and contexts in windows; `labels` has for each row the places of the answer's first and last token."""

    windows: Sequence[Window] = ()

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """`labels` [B, 2] int32, columns of the batch, and `places` [B, T] int32, 1 where an answer may be."""
        real = [row for row in rows if row >= 0]
        batch = self.template.batch([self.rows[row] for row in real], len(rows), length)
        batch["labels"], batch["places"] = np.zeros((len(rows), 2), np.int32), np.zeros((len(rows), length), np.int32)
        for number, row in enumerate(real):
            window, size = self.windows[row], int(self.sizes[row])
            first = self.template.place(size, length).start or 0
            text = first + window.place
            batch["places"][number, text : text + window.tokens.stop - window.tokens.start] = 1
            batch["places"][number, first + summary(self.template, size)] = 1
            batch["labels"][number] = first + self.labels[row]
        return batch


@dataclass(frozen=True)
class Answers(FileTask):
    """Questions on texts, in SQuAD's JSON. Articles are held out as wholes."""

    head: ClassVar[Literal["classes", "token_classes"]] = "token_classes"
    whole_json: ClassVar[bool] = True
    units: ClassVar[str] = "articles"

    unanswerable: bool | None = None
    """Whether a question may have no answer (SQuAD 2.0); None = whether one in `path` has none."""
    threshold: float = 0.0
    """How much better no answer must be than the best one to be given (as `evaluate` finds best on held-out text)."""
    longest: int = 30
    """Tokens of an answer, at most."""
    candidates: int = 20
    """How many answers are kept of each question, with probabilities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("longest", "candidates"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} {value}: choose 1 or more")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("f1", "exact_match")

    @property
    def outputs(self) -> int:
        return 2

    @property
    def _reading(self) -> tuple[Any, ...]:
        return ()

    def _unit(self, number: int, example: Question) -> int:
        return example.article

    def with_labels(self) -> Answers:
        """The task that knows whether there are questions without an answer."""
        if self.unanswerable is not None:
            return self
        return replace(self, unanswerable=any(not question.answers for question in self.examples("train")))

    def encode(self, examples: Sequence[Question], encoder: Encoder, labelled: bool = True) -> Encoded:
        tokenizer, template, reader = encoder
        check_room(reader.length, template.special(2) + 2)
        most = min(LONGEST_QUESTION, (reader.length - template.special(2)) // 2)
        speller = Speller(tokenizer)
        contexts: dict[str, Located] = {}
        rows, labels, windows = [], [], []
        for number, example in enumerate(examples):
            asked = speller.text(example.question)
            if example.context not in contexts:
                contexts[example.context] = speller.text(example.context)
            context = contexts[example.context]
            question = Part(asked.ids[:most], asked.words[:most])
            room = reader.length - template.special(2) - len(question.ids)
            place = len(template.before) + len(question.ids) + len(template.between)
            numbered = int(question.words.max(initial=0))
            gold = context.find(*span(example.answers[0])) if labelled and example.answers else None
            best = reader.best(len(context.ids), room)
            for window, start in enumerate(reader.starts(len(context.ids), room)):
                part = slice(start, min(start + room, len(context.ids)))
                row = template.joined([question, Part(context.ids[part], context.words[part] + numbered)])
                inside = gold is not None and part.start <= gold[0] and gold[1] < part.stop
                null = summary(template, len(row.tokens))
                labels.append(np.array(gold) - start + place if inside else np.array([null, null]))
                rows.append(row._replace(cut=window == 0 and len(asked.ids) > most))
                windows.append(Window(number, part, place, best[part] == window))
        said = partial(self._said, examples, contexts, template, [len(row.tokens) for row in rows], windows)
        measured = partial(self._measure, examples, said)
        store = SpanStore(tokenizer.vocabulary, template, rows, labels, measured, windows=windows)
        return Encoded(store, partial(self._predictions, examples, said))

    def _said(
        self,
        examples: Sequence[Question],
        contexts: dict[str, Located],
        template: Template,
        sizes: list[int],
        windows: list[Window],
        outputs: Outputs,
    ) -> list[Said]:
        """The best answers of each question over all its windows, where the score of none is the lowest of theirs."""
        spans: list[list[tuple[float, int, int]]] = [[] for _ in examples]
        null = np.full(len(examples), np.inf)
        for number, scores in by_row(outputs):
            window, size = windows[number], sizes[number]
            scores = scores[template.place(size, len(scores))].astype(np.float64)
            null[window.question] = min(null[window.question], scores[summary(template, size)].sum())
            first = window.tokens.start
            text = scores[window.place :][: window.tokens.stop - first]
            found = best_spans(text[:, 0], text[:, 1], window.best, self.longest, self.candidates)
            spans[window.question] += [(score, first + start, first + end) for score, start, end in found]
        return [
            self._ranked(contexts[example.context], sorted(found, reverse=True), none)
            for example, found, none in zip(examples, spans, null, strict=True)
        ]

    def _ranked(self, context: Located, spans: list[tuple[float, int, int]], null: float) -> Said:
        texts: dict[str, float] = {}
        for score, start, end in spans:
            text = context.between(start, end)
            if text.strip() and text not in texts and len(texts) < self.candidates:
                texts[text] = score
        texts = texts or {"": null}
        scores = [*texts.values(), *([null] if self.unanswerable else [])]
        probabilities = softmax(scores)[: len(texts)]
        best = [Candidate(text, texts[text], float(p)) for text, p in zip(texts, probabilities, strict=True)]
        return Said(best, null - best[0].score)

    def answer(self, said: Said) -> str:
        """The best answer, or "" where none is better by more than the threshold."""
        return "" if self.unanswerable and said.null > self.threshold else said.best[0].text

    def _measure(self, examples: Sequence[Question], said: Any, outputs: Outputs) -> dict[str, float]:
        """`f1` and `exact_match`, 0 to 1; with unanswerable questions also those of each kind, and the threshold that
        would have been best, with its f1."""
        found = said(outputs)
        gold = [[answer.text for answer in example.answers] for example in examples]
        scores = np.array([scored(self.answer(one), answers) for one, answers in zip(found, gold, strict=True)])
        result = {"f1": scores[:, 0].mean(), "exact_match": scores[:, 1].mean()}
        has = np.array([bool(answers) for answers in gold])
        if self.unanswerable and not has.all():
            for name, kind in (("answered", has), ("unanswered", ~has)):
                result |= {f"f1_{name}": scores[kind, 0].mean()} if kind.any() else {}
            best = np.array([scored(one.best[0].text, answers)[0] for one, answers in zip(found, gold, strict=True)])
            result |= best_threshold(np.array([one.null for one in found]), np.where(has, best, 0.0), has)
        return {name: float(value) for name, value in result.items()}

    def _predictions(self, examples: Sequence[Question], said: Any, outputs: Outputs) -> list[Any]:
        """{"id", "answer", "null", "best": [{"text", "probability", "score"}]} of each question."""
        return [
            {
                "id": example.id,
                "answer": self.answer(one),
                "null": round(one.null, 6),
                "best": [
                    {"text": text, "probability": round(p, 6), "score": round(score, 6)} for text, score, p in one.best
                ],
            }
            for example, one in zip(examples, said(outputs), strict=True)
        ]

    def files(self, predictions: list[Any], output: Path) -> dict[Path, str]:
        """The files of SQuAD's scripts: {id: answer}, beside it the best answers of each and, where a question may have
        none, by how much none is better (--na-prob-file)."""
        beside = {"nbest": {one["id"]: one["best"] for one in predictions}}
        if self.unanswerable:
            beside["null_odds"] = {one["id"]: one["null"] for one in predictions}
        written = {output: {one["id"]: one["answer"] for one in predictions}}
        written |= {output.with_suffix(f".{name}.json"): value for name, value in beside.items()}
        return {path: json.dumps(value, ensure_ascii=False, indent=1) + "\n" for path, value in written.items()}

    def inputs(self, file: File) -> Iterator[Question]:
        """Questions in the same JSON, whose answers, if there are any, are not looked at."""
        return questions(file, self.errors, labelled=False)

    def _read(self, file: File) -> Iterator[Question]:
        return questions(file, self.errors)


def summary(template: Template, size: int) -> int:
    """The place in a row of `size` tokens of the one that stands for the whole row, at which there is no answer: BERT's
    first, and where a model's head reads the last (GPT, XLNet) that."""
    return size - 1 if template.classification_last else 0


def span(answer: Answer) -> tuple[int, int]:
    return answer.start, answer.start + len(answer.text)


def best_spans(
    start: np.ndarray, end: np.ndarray, allowed: np.ndarray, longest: int, count: int
) -> list[tuple[float, int, int]]:
    """(score, first, last) of the `count` best spans of at most `longest` tokens that start where it is `allowed` [n];
    start, end [n]."""
    size = len(start)
    last = np.arange(size)[:, None] + np.arange(min(longest, size))
    scores = np.where((last < size) & allowed[:, None], start[:, None] + end[np.minimum(last, size - 1)], -np.inf)
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    found = zip(*np.unravel_index(order, scores.shape), strict=True)
    return [(float(scores[a, n]), int(a), int(a + n)) for a, n in found if np.isfinite(scores[a, n])]


def normalized(text: str) -> str:
    """Without case, punctuation, articles and superfluous white space (SQuAD's evaluation script)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def scored(said: str, answers: Sequence[str]) -> tuple[float, float]:
    """F1 over words, and whether the answer is right: the best over those that people gave. Where these are none, "" is
    right."""
    gold = [text for text in answers if normalized(text)] or [""]
    return max(word_f1(said, text) for text in gold), max(float(normalized(said) == normalized(text)) for text in gold)


def word_f1(said: str, gold: str) -> float:
    one, other = normalized(said).split(), normalized(gold).split()
    if not (one and other):
        return float(one == other)
    shared = (Counter(one) & Counter(other)).total()
    return 2 * shared / (len(one) + len(other))


def best_threshold(null: np.ndarray, f1: np.ndarray, has: np.ndarray) -> dict[str, float]:
    """The threshold with the best f1, and that: null [N], f1 [N] of the best answers (0 where there is none), has [N]
    bool. Nothing is answered below the least of `null`, and from each of them on one more (SQuAD 2.0's script)."""
    order = np.argsort(null, kind="stable")
    gain = np.where(has, f1, -1.0)[order]
    total = np.concatenate([[0.0], np.cumsum(gain)]) + np.count_nonzero(~has)
    best = int(total.argmax())
    threshold = null[order[best - 1]] if best else null[order[0]] - 1.0
    return {"best_f1": float(total[best] / len(null)), "best_threshold": float(threshold)}


def questions(file: File, errors: Errors, labelled: bool = True) -> Iterator[Question]:
    """The questions of a file. Raises ValueError, naming file, line and question, for what is none, and for an answer
    that is not in its context."""
    content = "".join(read(file, errors))
    try:
        data = json.loads(content)["data"]
        articles = [[(one["context"], [{**q} for q in one["qas"]]) for one in a["paragraphs"]] for a in data]
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} line {error.lineno} is not JSON: {error.msg}") from None
    except (KeyError, TypeError):
        raise ValueError(
            f'{file} is not SQuAD\'s JSON: it must be like {{"data": [{{"paragraphs": [{{"context": "...", "qas": '
            '[{"id": "1", "question": "...", "answers": [{"text": "...", "answer_start": 0}]}]}]}]}'
        ) from None
    at, line = 0, 1
    lines: dict[str, int] = {}
    for number, article in enumerate(articles):
        for context, asked in article:
            for entry in asked:
                found = place(content, entry.get("id"), at)
                at, line = found, line + content.count("\n", at, found)
                where = f"{file} line {line}: question {entry.get('id')!r}"
                one = question(entry, context, number, where, labelled, errors)
                if one.id in lines:
                    raise ValueError(
                        f"{file} line {line}: question {one.id!r} has the id of the one in line {lines[one.id]}: "
                        "give each an id of its own"
                    )
                lines[one.id] = line
                yield one


def place(content: str, name: Any, at: int) -> int:
    """Behind `at` the place of the id that is this one, or `at` if there is none."""
    written = json.dumps(name), json.dumps(name, ensure_ascii=False)
    return next((each.end() for each in ID.finditer(content, at) if content.startswith(written, each.end())), at)


def question(entry: dict[str, Any], context: Any, article: int, where: str, labelled: bool, errors: Errors) -> Question:
    texts: dict[str, str] = {}
    for what, text in (("context", context), ("question", entry.get("question")), ("id", entry.get("id"))):
        if isinstance(text, int | float):
            raise ValueError(f'{where}: its {what} must be a text: write it in quotes, "{json.dumps(text)}"')
        if not (isinstance(text, str) and text.strip()):
            raise ValueError(f"{where}: its {what} is empty or no text: fill it, or leave the question out")
        texts[what] = without_halves(text, f"{where}: its {what}", errors)
    answers: list[Answer] = []
    answered = labelled and not entry.get("is_impossible")
    if answered and not isinstance(entry.get("answers"), list):
        raise ValueError(f"{where}: it has no list of answers: give one, which is [] where the text has no answer")
    for given in entry["answers"] if answered else ():
        found: Any = given if isinstance(given, dict) else {}
        answer = Answer(found.get("text"), found.get("answer_start"))
        if not (isinstance(answer.text, str) and answer.text.strip() and type(answer.start) is int):
            raise ValueError(f"{where}: an answer needs text and answer_start: mend it, or leave the question out")
        answer = answer._replace(text=without_halves(answer.text, f"{where}: an answer", errors))
        start, end = span(answer)
        if start < 0 or texts["context"][start:end] != answer.text:
            raise ValueError(
                f"{where}: the answer {answer.text!r} is not in its context at {start} (there stands "
                f"{texts['context'][max(start, 0) : end]!r}): mend answer_start, or leave the question out"
            )
        answers.append(answer)
    return Question(**texts, answers=tuple(answers), article=article)
