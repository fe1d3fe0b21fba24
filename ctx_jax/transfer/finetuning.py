"""Fine-tuning: a model of another run under a task, and what the task's examples decide of an experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ctx_jax.data.articles import ArticleCorpus
from ctx_jax.data.corpora import Split
from ctx_jax.data.examples import ExampleStore
from ctx_jax.data.tokenizers import Pretrained, Tokenizer
from ctx_jax.evaluation.files import Encoder, FileTask
from ctx_jax.experiment import TOKENIZER, Experiment, load
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import TASK_TOKENS, GptConfig
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.progress import tell
from ctx_jax.text import kept, own_tokenizer
from ctx_jax.training.checkpoints import named
from ctx_jax.transfer.detection import ArticleTask, form

HEAD = ("classifier", "token_classifier")
"""The modules of heads: what another task's learned is not taken over."""


def is_task(experiment: Experiment) -> bool:
    return isinstance(experiment.data.corpus, FileTask)


def adapted(experiment: Experiment, source: Path) -> Experiment:
    """The experiment of a task with the network and the tokenizer of the run that it starts from; without a memory,
    since examples do not go on from each other; that of a distillation with the run's network as teacher. Another
    experiment stays as it is."""
    distils = isinstance(experiment.objective, Distillation)
    if not (is_task(experiment) or distils):
        return experiment
    folder, _ = named(source)
    origin = load(folder / "experiment.json")
    tokenizer = kept(folder)
    if distils:
        return distilled(experiment, origin.model, folder)
    corpus = experiment.data.corpus
    if corpus.head == "classes":
        heads: dict[str, Any] = {"token_classes": None, "pooler": True}
    else:
        heads = {"classes": None, "pooler": False}
    model = with_fields(origin.model, memory_length=0, reuse_length=None, **heads)
    reader = experiment.data.reader
    if (most := getattr(model, "max_length", None)) is not None and most < reader.length:
        reader = replace(reader, length=most)
    if isinstance(corpus, ArticleTask):
        if not isinstance(origin.data.corpus, ArticleCorpus):
            raise ValueError(f"--from {source} was not trained on articles: choose a run of grover")
        corpus = replace(corpus, texts=origin.data.corpus.fields)
    elif isinstance(model, GptConfig):
        v = tokenizer.vocabulary
        model = replace(model, task_tokens=len({v.begin, v.separator, v.classification}) < TASK_TOKENS)
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
    experiment = replace(
        experiment,
        data=replace(experiment.data, corpus=task),
        model=with_fields(experiment.model, **{task.head: task.outputs}),
    )
    training = experiment.training
    training = replace(training, best=training.best or task.chooses)
    if training.epochs is not None:
        batches = trained_rows(experiment) / experiment.data.batch_size
        every = max(1, math.ceil(batches))
        training = replace(
            training,
            steps=max(1, math.ceil(training.epochs * batches)),
            evaluate_every=training.evaluate_every or every,
            checkpoint_every=training.checkpoint_every or every,
        )
    return replace(experiment, training=training)


def with_threshold(task: FileTask, threshold: float | None) -> FileTask:
    """The task with another threshold, if one is given. Raises ValueError for a task that has none."""
    if threshold is None:
        return task
    if not hasattr(task, "threshold"):
        raise ValueError(f"--threshold: {type(task).__name__} has no threshold, leave the option out")
    return with_fields(task, threshold=threshold)


def trained_rows(experiment: Experiment) -> int:
    """Rows in a pass over the training examples; where these are read in windows, the tokens tell how many."""
    task, reader = experiment.data.corpus, experiment.data.reader
    examples = list(task.examples("train"))
    if not hasattr(reader, "stride"):
        return len(examples)
    return len(task.encode(examples, encoder(experiment, reader, own_tokenizer(experiment.data))).store.rows)


def encoder(experiment: Experiment, reader: Any, tokenizer: Tokenizer) -> Encoder:
    """How the experiment's model reads examples."""
    both = getattr(experiment.objective, "both_orders", False)
    shape = form(experiment.data.corpus, experiment.model, tokenizer.vocabulary, both_orders=both)
    return Encoder(tokenizer, shape, reader)


def open_examples(experiment: Experiment, splits: Iterable[Split], tokenizer: Tokenizer) -> dict[Split, ExampleStore]:
    """The examples of these splits in tokens, as the reader of each wants them. Tells how many are cut."""
    task = experiment.data.corpus
    stores: dict[Split, ExampleStore] = {}
    for split in splits:
        reader = experiment.data.reader if split == "train" else experiment.evaluation_reader
        examples = list(task.examples(split))
        store = task.encode(examples, encoder(experiment, reader, tokenizer)).store
        windows = f" in {len(store.rows):,} windows" if len(store.rows) > len(examples) else ""
        cut = f", {store.cut:,} cut to {reader.length} tokens (data.reader.length)" if store.cut else ""
        tell(f"{split}: {len(examples):,} examples{windows}{cut}")
        stores[split] = replace(store, corpus=task.fingerprint(split), split=split)
    return stores
