"""XLNet (Yang et al. 2019, arXiv 1906.08237).

The paper's text (Wikipedia, BooksCorpus, Giga5, ClueWeb, CommonCrawl) is your own to give, --text FOLDER.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.readers import Lanes
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.experiment import Data, Experiment
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.permutation import Permutation
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import AdamW, BertAdam
from ctx_jax.training.schedules import WarmUp


def tiny() -> Experiment:
    """XLNet with two streams, memory, segment pairs and both reading directions on the speeches, for a laptop's CPU.

    python -m ctx_jax train xlnet:tiny
    """
    return Experiment(
        name="xlnet-tiny",
        data=Data(
            reader=Lanes(128, join_documents=True, pairs=True, direction="both"),
            tokenizer=SentencePiece(2048),
            batch_size=4,
            evaluation_batch_size=16,
        ),
        model=XLNetConfig(
            vocabulary_size=2048,
            width=128,
            layers=2,
            heads=4,
            feed_forward=512,
            memory_length=96,
            reuse_length=64,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        objective=Permutation(num_predict=21, perm_size=64),
        optimizer=AdamW(schedule=WarmUp(rate=1e-3, warmup=40)),
        training=Training(steps=600, evaluate_every=200, checkpoint_every=200),
    )


def base() -> Experiment:
    """XLNet base, trained as the large model on Wikipedia and BooksCorpus alone (section 3.4: as BERT base).

    Windows of 512 of which 256 are reused, memory 384, 85 targets, spans of 1 to 5 in a context of 6 times that.
    Published: RACE 66.05, SQuAD 2.0 F1 81.33, MNLI 85.84 (table 6).

    python -m ctx_jax train xlnet:base --text FOLDER
    """
    return Experiment(
        name="xlnet-base",
        data=Data(
            reader=Lanes(512, join_documents=True, pairs=True, direction="both"),
            corpus=TextFiles(Path("text")),
            tokenizer=SentencePiece(32_000),
            batch_size=256,
        ),
        model=XLNetConfig(dtype="bfloat16"),
        objective=Permutation(),
        optimizer=BertAdam(schedule=WarmUp(rate=1e-4, warmup=20_000, final=0.001)),
        training=Training(steps=500_000, evaluate_every=5_000, checkpoint_every=5_000, log_every=100),
    )


def large() -> Experiment:
    """XLNet large: 500,000 steps of 8,192 windows; 512 TPU v3 chips for 5.5 days (section 3.1).

    Adam 4e-4 after 40,000 steps of warm-up, linear decay, decay 0.01, epsilon 1e-6, dropout 0.1 (table 8); without bias
    correction and with clipping at 1 (code).
    Published: SQuAD 2.0 F1 90.6, RACE 85.4, MNLI 90.8.

    python -m ctx_jax train xlnet:large --text FOLDER --mesh.fsdp 16
    """
    small = base()
    return replace(
        small,
        name="xlnet-large",
        data=replace(small.data, batch_size=8_192),
        model=replace(small.model, width=1024, layers=24, heads=16, feed_forward=4096),
        optimizer=replace(small.optimizer, schedule=WarmUp(rate=4e-4, warmup=40_000, final=0.001)),
    )
