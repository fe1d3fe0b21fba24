"""Grover (Zellers et al. 2019, arXiv 1905.12616): a decoder over articles as fields, each written from the others.

    python -m ctx_jax train grover:base --text articles.jsonl --data.corpus.fields domain date authors title text
    python -m ctx_jax write RUN --field title --input articles.jsonl
    python -m ctx_jax train grover:detector --from RUN --text labelled.jsonl

The paper's RealNews (120 GB) is not public: give your own JSON lines, a field of text each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.articles import Articles, Fields, SotuArticles
from ctx_jax.data.subwords import ByteLevelBPE
from ctx_jax.experiment import Data, Experiment, find
from ctx_jax.models.gpt import GptConfig
from ctx_jax.objectives.causal import Causal
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import Adafactor
from ctx_jax.training.schedules import WarmUp
from ctx_jax.transfer.detection import ArticleTask


def tiny() -> Experiment:
    """The speeches with president, year and title, for a laptop's CPU: about two minutes.

    python -m ctx_jax train grover:tiny
    """
    small = find("gpt:tiny")
    data = replace(small.data, reader=Fields(128, excerpts=True), corpus=SotuArticles())
    return replace(small, name="grover-tiny", data=data)


def base() -> Experiment:
    """Grover-Base: GPT-2 small; 800,000 steps of 512 rows of 1,024 tokens (section 3.3).

    Adafactor, 1e-4 after 10,000 steps of warm-up, then linear decay. Grover-Mega took two weeks on 256 TPU v3 cores,
    and has a perplexity of 8.7 on the body of RealNews, given its other fields.
    """
    return Experiment(
        name="grover-base",
        data=Data(
            reader=Fields(1024),
            corpus=Articles(path=Path("articles.jsonl")),
            tokenizer=ByteLevelBPE(50_257),
            batch_size=512,
        ),
        model=GptConfig(dtype="bfloat16"),
        objective=Causal(),
        optimizer=Adafactor(schedule=WarmUp(rate=1e-4, warmup=10_000)),
        training=Training(steps=800_000, evaluate_every=10_000, checkpoint_every=10_000, log_every=100),
    )


def large() -> Experiment:
    """Grover-Large: GPT-2 medium."""
    small = base()
    return replace(
        small, name="grover-large", model=replace(small.model, width=1024, layers=24, heads=16, feed_forward=4096)
    )


def mega() -> Experiment:
    """Grover-Mega: GPT-2 XL."""
    small = base()
    return replace(
        small, name="grover-mega", model=replace(small.model, width=1600, layers=48, heads=25, feed_forward=6400)
    )


def detector() -> Experiment:
    """The run after --from, fine-tuned to tell articles apart by their label (JSON lines of fields and `label`), as
    human from machine. Published: Grover-Mega tells its own from people's with 92.0 % accuracy (table 1, unpaired).

    python -m ctx_jax train grover:detector --from RUN --text labelled.jsonl
    """
    default = find("finetune:classification")
    model = replace(find("gpt:tiny").model, classes=2, dropout=0.1, attention_dropout=0.1)
    reader = replace(default.data.reader, length=256)
    data = replace(default.data, corpus=ArticleTask(Path("labelled.jsonl")), reader=reader)
    return replace(default, name="detector", model=model, data=data)
