"""The nine tasks of GLUE (Wang et al. 2018, arXiv 1804.07461), and IMDb (Maas et al. 2011): the network is that of the
run that --from names.

    python -m ctx_jax train glue:rte --from RUN --text glue_data/RTE --run runs/rte
    python -m ctx_jax train glue:rte --from RUN --text tfds:glue/rte --run runs/rte
    python -m ctx_jax submit runs/rte --output runs/submission

--text is the folder of the task as GLUE's download has it, or tfds:NAME where TFDS has prepared it in the array_record
format. The recipe is that of finetune.py; BERT's grid is a sweep:

    python -m ctx_jax sweep experiments/sweeps/finetuning.py:rte -- --from RUN --text glue_data/RTE

Published, BERT base, test (Devlin et al. 2018, table 1): MNLI 84.6/83.4, QQP 71.2 (F1), QNLI 90.5, SST-2 93.5, CoLA
52.1 (Matthews), STS-B 85.8 (Spearman), MRPC 88.9 (F1), RTE 66.4.
"""

from __future__ import annotations

from dataclasses import replace

from ctx_jax.evaluation.glue import Glue
from ctx_jax.experiment import Experiment, find


def cola() -> Experiment:
    """Whether a sentence is English that one could say; Matthews' correlation."""
    return _task("cola", "CoLA")


def sst2() -> Experiment:
    """Whether a sentence of a film review is positive; accuracy."""
    return _task("sst2", "SST-2")


def mrpc() -> Experiment:
    """Whether two sentences of the news mean the same; F1 and accuracy."""
    return _task("mrpc", "MRPC")


def stsb() -> Experiment:
    """How similar two sentences are, from 0 to 5; Pearson's and Spearman's correlation."""
    return _task("stsb", "STS-B")


def qqp() -> Experiment:
    """Whether two questions of Quora ask the same; F1 and accuracy."""
    return _task("qqp", "QQP")


def mnli() -> Experiment:
    """Whether a sentence follows from another, contradicts it or neither; accuracy on the genres of training."""
    return _task("mnli", "MNLI")


def mnli_mismatched() -> Experiment:
    """As `mnli`, validated on other genres than those of training."""
    return _task("mnli_mismatched", "MNLI")


def qnli() -> Experiment:
    """Whether a sentence of Wikipedia answers a question; accuracy."""
    return _task("qnli", "QNLI")


def rte() -> Experiment:
    """Whether a sentence follows from a text; accuracy."""
    return _task("rte", "RTE")


def wnli() -> Experiment:
    """Whether a pronoun means what the second sentence says; accuracy. BERT's paper leaves it out."""
    return _task("wnli", "WNLI")


def imdb() -> Experiment:
    """Whether a film review is positive; accuracy. --text aclImdb, as published, or tfds:imdb_reviews/plain_text."""
    experiment = _task("imdb", "aclImdb")
    reader = replace(experiment.data.reader, length=512)
    model = replace(experiment.model, max_length=512)
    return replace(experiment, data=replace(experiment.data, reader=reader), model=model)


def _task(name: str, folder: str) -> Experiment:
    default = find("finetune:classification")
    return replace(default, name=name.replace("_", "-"), data=replace(default.data, corpus=Glue(folder, name=name)))
