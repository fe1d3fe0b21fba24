"""Fine-tuning: a model of another run under a task, and what the task's examples decide of an experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ctx_jax.data.articles import ArticleCorpus
from ctx_jax.data.corpora import Split
from ctx_jax.data.examples import ExampleStore
from ctx_jax.data.tokenizers import Pretrained, Tokenizer
from ctx_jax.evaluation.tasks import Task, measure
from ctx_jax.experiment import TOKENIZER, Experiment, load
from ctx_jax.models.bert import BertConfig
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.progress import tell
from ctx_jax.training.checkpoints import named
from ctx_jax.transfer.detection import ArticleTask, form

HEAD = ("classifier",)
"""The modules of a head on rows: what another task's learned is not taken over."""


def is_task(experiment: Experiment) -> bool:
    return isinstance(experiment.data.corpus, Task)


def adapted(experiment: Experiment, source: Path) -> Experiment:
    """The experiment of a task with the network and the tokenizer of the run that it starts from; without a memory,
    since examples do not go on from each other; that of a distillation with the run's network as teacher. Another
    experiment stays as it is."""
    distils = isinstance(experiment.objective, Distillation)
    if not (is_task(experiment) or distils):
        return experiment
    folder, _ = named(source)
    origin = load(folder / "experiment.json")
    theirs = origin.model
    if distils:
        return distilled(experiment, theirs, folder)
    model = with_fields(theirs, memory_length=0, reuse_length=None, pooler=True)
    reader = experiment.data.reader
    if (most := getattr(model, "max_length", None)) is not None and most < reader.length:
        reader = replace(reader, length=most)
    corpus = experiment.data.corpus
    if isinstance(corpus, ArticleTask):
        if not isinstance(origin.data.corpus, ArticleCorpus):
            raise ValueError(f"--from {source} was not trained on articles: choose a run of grover")
        corpus = replace(corpus, texts=origin.data.corpus.fields)
    data = replace(experiment.data, corpus=corpus, tokenizer=Pretrained(folder / TOKENIZER), reader=reader)
    return replace(experiment, model=model, data=data)


def distilled(experiment: Experiment, teacher: Any, folder: Path) -> Experiment:
    """The experiment of a distillation with this teacher, whose run is in `folder`: the student is like it, with half
    of the layers, and without segments and pooler (Sanh et al. 2019, section 2). Raises ValueError for a teacher that
    is no encoder."""
    if not isinstance(teacher, BertConfig):
        raise ValueError(f"--from {folder} is a {type(teacher).__name__}: choose a run of BERT to distil")
    student = replace(
        teacher, layers=max(1, teacher.layers // 2), segments=0, pooler=False, classes=None, token_classes=None
    )
    data = experiment.data
    reader = replace(data.reader, length=min(data.reader.length, teacher.max_length))
    return replace(
        experiment,
        model=student,
        objective=replace(experiment.objective, teacher=teacher),
        data=replace(data, tokenizer=Pretrained(folder / TOKENIZER), reader=reader),
    )


def with_fields(config: Any, **values: Any) -> Any:
    """The config with those of the values for which it has a field."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if name in known})


def completed(experiment: Experiment) -> Experiment:
    """The experiment with what the examples decide: the names of the classes, the size of the head, the steps of so
    many epochs, and by what the best checkpoint is chosen; of articles, the ids that mark their fields. Another stays
    as it is.

    Raises ValueError for bad examples, naming file and line.
    """
    if not is_task(experiment):
        if experiment.training.epochs is not None:
            raise ValueError("training.epochs counts passes over labelled examples: choose training.steps")
        if isinstance(corpus := experiment.data.corpus, ArticleCorpus):
            size = experiment.data.tokenizer.vocabulary_size + corpus.markers
            return replace(experiment, model=replace(experiment.model, vocabulary_size=size))
        return experiment
    task = experiment.data.corpus.with_labels()
    if task.kind == "classification" and len(task.labels) < 2:
        raise ValueError(f"{task.path} has one label alone, {', '.join(task.labels)}: give examples of two or more")
    classes = len(task.labels) if task.kind == "classification" else 1
    training = experiment.training
    training = replace(training, best=training.best or task.chooses)
    if training.epochs is not None:
        batches = sum(1 for _ in task.examples("train")) / experiment.data.batch_size
        every = max(1, math.ceil(batches))
        training = replace(
            training,
            steps=max(1, math.ceil(training.epochs * batches)),
            evaluate_every=training.evaluate_every or every,
            checkpoint_every=training.checkpoint_every or every,
        )
    model = replace(experiment.model, classes=classes)
    return replace(experiment, data=replace(experiment.data, corpus=task), model=model, training=training)


def open_examples(experiment: Experiment, splits: Iterable[Split], tokenizer: Tokenizer) -> dict[Split, ExampleStore]:
    """The examples of these splits in tokens. Tells how many are cut."""
    task, length = experiment.data.corpus, experiment.data.reader.length
    shape = form(task, experiment.model, tokenizer.vocabulary)
    if length < (least := shape.special(len(task.texts)) + len(task.texts)):
        raise ValueError(f"data.reader.length {length} has no room for text: choose {least} or more")
    stores: dict[Split, ExampleStore] = {}
    for split in splits:
        examples = list(task.examples(split))
        labels = task.targets(examples)
        texts = [[tokenizer.encode(text) for text in example.texts] for example in examples]
        store = ExampleStore(
            tokenizer.vocabulary, shape, texts, labels, partial(measure, task, labels), task.fingerprint(split), split
        )
        long = int(np.count_nonzero(store.sizes > length))
        cut = f", {long:,} cut to {length} tokens (data.reader.length)" if long else ""
        tell(f"{split}: {len(texts):,} examples{cut}")
        stores[split] = store
    return stores
