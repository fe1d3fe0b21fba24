"""Probes: how much of a task the frozen features of a model hold, by a small model on top of them.

    classification   logistic regression on a vector a text (Conneau & Kiela 2018, arXiv 1803.05449, SentEval)
    tagging          a BiLSTM of two layers and a linear layer on a vector a word (Devlin et al. 2018, section 5.3)

The features are computed once. What the probe is free to choose (how strongly it is regularised, after which epoch it
stops) is chosen on the validation split; the test split is scored once, at the end.

Deviations: the paper's BiLSTM reads the first token's vector of each word, in the context of its document, and is 768
wide. Here a word's vector is what `features.Choice` says, by default the mean of its tokens, and the width an option.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from seqeval.metrics import f1_score, precision_score, recall_score
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ctx_jax.data.corpora import Split
from ctx_jax.data.examples import lengths
from ctx_jax.data.tokenizers import Tokenizer, word_characters
from ctx_jax.evaluation.tagging import Tagging
from ctx_jax.evaluation.tasks import Task, measure
from ctx_jax.progress import tell
from ctx_jax.runs import Trained, divisible_rows, open_run
from ctx_jax.transfer.features import Choice, Rows, numbered, write
from ctx_jax.transfer.inputs import row_length, template

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1.0)
"""Inverse strengths of the L2 penalty that are tried, on standardised features."""


@dataclass(frozen=True)
class Tagger:
    """The BiLSTM on words' vectors, and how it is trained: Adam at a constant rate."""

    width: int = 128
    """Units of each direction of each layer (the paper: 768 in all)."""
    rate: float = 1e-3
    """Learning rate."""
    epochs: int = 15
    """Passes over the training sentences; the one that does best on validation counts."""
    dropout: float = 0.5
    """Rate on the vectors, between the layers and before the linear layer."""
    weighted: bool = False
    """The model's layers are added with weights that are learned (Peters et al. 2018, arXiv 1802.05365, equation 1),
    instead of what --combine makes of them."""
    rows: int = 32
    """Sentences in a batch."""

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--tagger.{name} {getattr(self, name)}: choose 1 or more")
        if not self.rate > 0:
            raise ValueError(f"--tagger.rate {self.rate}: choose a rate above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--tagger.dropout {self.dropout} is no share: choose one of 0 or more and below 1")


class Vectors(NamedTuple):
    """Features of texts: those of text i are rows offsets[i] to offsets[i + 1]."""

    features: np.ndarray
    offsets: np.ndarray


def vectors(run: Trained, choice: Choice, texts: Sequence[Sequence[str]], length: int | None, size: int) -> Vectors:
    """The features of texts, or of pairs of them, by a run. Arguments and errors as `features.extract`."""
    config = run.experiment.model
    numbered(choice, config.layers)
    shape = template(config, run.tokenizer.vocabulary)
    rows = Rows(shape, run.tokenizer, row_length(config, shape, length, len(texts[0])), choice.pooling, texts)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.npz"
        write(run, choice, rows, divisible_rows(run.mesh, size), None, file)
        found = np.load(file)["features"]
    if rows.cut:
        tell(f"note: {rows.cut:,} of {len(texts):,} texts are longer than {rows.length} tokens (--length) and were cut")
    return Vectors(found, np.array(rows.offsets))


def classify(
    path: Path, task: Task, choice: Choice, *, checkpoint: str = "last", length: int | None = None, batch_size: int = 32
) -> dict[str, Any]:
    """Logistic regression on the features of a task's texts.

    Returns {"run", "step", "layers", "combine", "pooling", "strength", "validation": metrics, "test": metrics}. Raises
    ValueError with one line for numbers instead of classes, vectors of words, and what `Task` finds in the files.
    """
    if task.kind != "classification":
        raise ValueError(f"kind {task.kind}: a probe predicts classes, choose classification or tagging")
    if choice.pooling in ("word", "none"):
        raise ValueError(f"--pooling {choice.pooling} gives several vectors a text: choose mean, first, last or max")
    task = task.with_labels()
    run = open_run(path, checkpoint)
    found, labels = {}, {}
    for split in SPLITS:
        examples = list(task.examples(split))
        labels[split] = task.targets(examples)
        tell(f"{split}: {len(examples):,} examples")
        found[split] = vectors(run, choice, [example.texts for example in examples], length, batch_size).features

    def scored(model: Any, split: Split) -> dict[str, float]:
        scores = np.full((len(labels[split]), len(task.labels)), -np.inf)
        scores[:, model.classes_] = model.predict_log_proba(found[split])
        return measure(task, labels[split], [{"example": np.arange(len(scores)), "scores": scores}])

    best: tuple[float, float, Any] | None = None
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=5000))
        model.fit(found["train"], labels["train"])
        score = scored(model, "validation")[task.chooses]
        if best is None or score > best[0]:
            best = score, strength, model
    assert best is not None
    metrics = {split: scored(best[2], split) for split in SPLITS[1:]}
    return {**about(path, run, choice), "strength": best[1], **metrics}


def tag(
    path: Path,
    task: Tagging,
    choice: Choice,
    tagger: Tagger,
    *,
    seed: int = 0,
    checkpoint: str = "last",
    length: int | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """A BiLSTM on the features of the task's words.

    Words without a vector, which are cut off or of which the tokenizer drops all, have zeros. Returns {"run", "step",
    "layers", "combine", "pooling", "epoch", "validation": {"f1", "precision", "recall"}, "test": ...} by entity. Raises
    ValueError for what `Tagging` finds in the files.
    """
    if tagger.weighted and len(choice.layers) < 2:
        raise ValueError(f"--tagger.weighted has one layer alone, {choice.layers}: give several in --layers")
    task.with_labels()
    sentences = {split: list(task.examples(split)) for split in SPLITS}
    choice = Choice(choice.layers, "concatenate" if tagger.weighted else choice.combine, "word")
    run = open_run(path, checkpoint)
    names = sorted({tag for sentence in sentences["train"] for tag in sentence.tags})
    numbers = {name: number for number, name in enumerate(names)}
    data: dict[Split, list[tuple[np.ndarray, np.ndarray]]] = {}
    for split in SPLITS:
        tell(f"{split}: {len(sentences[split]):,} sentences")
        found = of_words(run, choice, [sentence.words for sentence in sentences[split]], length, batch_size)
        tags = [np.array([numbers.get(tag, -1) for tag in sentence.tags]) for sentence in sentences[split]]
        data[split] = list(zip(found, tags, strict=True))

    def scored(predicted: list[np.ndarray], split: Split) -> dict[str, float]:
        said = [[names[tag] for tag in row] for row in predicted]
        gold = [list(sentence.tags) for sentence in sentences[split]]
        scores = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        return {name: float(cast(Any, score)(gold, said, zero_division=0)) for name, score in scores.items()}

    best: tuple[dict[str, float], int, Any] | None = None
    trained = training(data["train"], tagger, len(names), seed, len(choice.layers) if tagger.weighted else 1)
    for epoch, (predict, params) in enumerate(trained, 1):
        scores = scored(predict(params, data["validation"]), "validation")
        tell(f"epoch {epoch}/{tagger.epochs}  validation f1 {scores['f1']:.4f}")
        if best is None or scores["f1"] > best[0]["f1"]:
            best = scores, epoch, (predict, params)
    assert best is not None
    predict, params = best[2]
    test = scored(predict(params, data["test"]), "test")
    combine = "weighted" if tagger.weighted else choice.combine
    return {**about(path, run, choice), "combine": combine, "epoch": best[1], "validation": best[0], "test": test}


def about(path: Path, run: Trained, choice: Choice) -> dict[str, Any]:
    layers = numbered(choice, run.experiment.model.layers)
    return {"run": str(path), "step": run.step, "layers": layers, "combine": choice.combine, "pooling": choice.pooling}


def of_words(
    run: Trained, choice: Choice, sentences: Sequence[Sequence[str]], length: int | None, size: int
) -> list[np.ndarray]:
    """[words, D] of each sentence; zeros where a word has no vector."""
    texts = [(" ".join("_".join(word.split()) for word in words),) for words in sentences]
    found = vectors(run, choice, texts, length, size)
    result = []
    for number, words in enumerate(sentences):
        own = found.features[found.offsets[number] : found.offsets[number + 1]]
        places = seen_words(run.tokenizer, texts[number][0])[: len(own)]
        rows = np.zeros((len(words), found.features.shape[1]), np.float32)
        rows[places] = own
        result.append(rows)
    return result


def seen_words(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Numbers, from 0, of the words of which the tokenizer has tokens."""
    encoding = tokenizer.encode(text)
    number = np.cumsum(word_characters(encoding.text)) - 1
    return np.unique(number[encoding.starts[encoding.word_starts()]])


class BiLSTM(nn.Module):
    """Two bidirectional layers and a linear one: [B, T, D] and the rows' lengths [B] -> scores [B, T, tags]. D holds
    the vectors of so many of a model's layers beside each other, of which a weighted sum is read."""

    tagger: Tagger
    tags: int
    layers: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, sizes: jax.Array, train: bool) -> jax.Array:
        drop = partial(nn.Dropout, self.tagger.dropout, deterministic=not train)
        if self.layers > 1:
            weights = jax.nn.softmax(self.param("weights", nn.initializers.zeros, (self.layers,)))
            scale = self.param("scale", nn.initializers.ones, ())
            x = scale * jnp.einsum("btld,l->btd", x.reshape(*x.shape[:2], self.layers, -1), weights)
        for _ in range(2):
            forward, backward = (nn.RNN(nn.OptimizedLSTMCell(self.tagger.width)) for _ in range(2))
            x = cast(jax.Array, nn.Bidirectional(forward, backward)(drop()(x), seq_lengths=sizes))
        return nn.Dense(self.tags)(drop()(x))


def training(
    data: list[tuple[np.ndarray, np.ndarray]], tagger: Tagger, tags: int, seed: int, layers: int = 1
) -> Iterator[Any]:
    """(function that predicts, parameters) after each epoch over sentences: their vectors [n, D] and tags [n], -1 for
    one that is not learned."""
    model = BiLSTM(tagger, tags, layers)
    optimizer = optax.adam(tagger.rate)
    root, chance = jax.random.key(seed), np.random.default_rng(seed)
    _, x, sizes, _ = next(batches(data[:1], tagger.rows))
    params = jax.jit(partial(model.init, train=False))(root, x, sizes)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array, x: jax.Array, sizes: jax.Array, tags: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = cast(jax.Array, model.apply(params, x, sizes, train=True, rngs={"dropout": key}))
            nll = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(tags, 0))
            return jnp.sum(jnp.where(tags >= 0, nll, 0)) / jnp.maximum(jnp.sum(tags >= 0), 1)

        updates, state_ = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state_

    scores_of = jax.jit(partial(model.apply, train=False))

    def predict(params: Any, data: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for numbers, x, sizes, _ in batches(data, tagger.rows):
            best = np.asarray(scores_of(params, x, sizes)).argmax(-1)
            found |= {number: row[:size] for number, row, size in zip(numbers, best, sizes, strict=False)}
        return [found[number] for number in range(len(data))]

    count = 0
    for _ in range(tagger.epochs):
        order = chance.permutation(len(data))
        for _, x, sizes, tags_ in batches([data[number] for number in order], tagger.rows):
            params, state = step(params, state, jax.random.fold_in(root, count), x, sizes, tags_)
            count += 1
        yield predict, params


def batches(data: list[tuple[np.ndarray, np.ndarray]], rows: int) -> Iterator[tuple[range, Any, Any, Any]]:
    """(numbers of the sentences, vectors [rows, T, D], lengths [rows], tags [rows, T] with -1 = padding), in order; T
    is one of a few lengths."""
    borders = lengths(1 << 20)
    for first in range(0, len(data), rows):
        mine = data[first : first + rows]
        longest = max(len(tags) for _, tags in mine)
        length = borders[int(np.searchsorted(borders, longest))]
        x = np.zeros((rows, length, mine[0][0].shape[1]), np.float32)
        tags = np.full((rows, length), -1, np.int32)
        sizes = np.zeros(rows, np.int32)
        for row, (vectors, own) in enumerate(mine):
            x[row, : len(own)], tags[row, : len(own)], sizes[row] = vectors, own, len(own)
        yield range(first, first + len(mine)), x, sizes, tags
