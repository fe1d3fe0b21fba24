"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860).

Give the papers' data sets with --text FOLDER. enwik8 is read as bytes, WikiText-103 as its words and line ends; our
special ids are in the vocabularies, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.readers import Lanes
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.symbols import Bytes, Words
from ctx_jax.experiment import Data, Experiment
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.objectives.segment import Segment
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import Adam, AdamW
from ctx_jax.training.schedules import WarmUp


def tiny() -> Experiment:
    """Transformer-XL with memory on the speeches, for a laptop's CPU: about a minute.

    python -m ctx_jax train transformer_xl:tiny
    """
    return Experiment(
        name="transformer-xl-tiny",
        data=Data(reader=Lanes(128), tokenizer=SentencePiece(2048), batch_size=4),
        model=TransformerXLConfig(
            vocabulary_size=2048,
            width=128,
            layers=2,
            heads=4,
            feed_forward=512,
            memory_length=128,
            dropout=0.0,
        ),
        objective=Segment(),
        optimizer=AdamW(schedule=WarmUp(rate=2e-3, warmup=40, decay="cosine"), weight_decay=0.0),
        training=Training(steps=600, evaluate_every=200, checkpoint_every=200),
    )


def enwik8_base() -> Experiment:
    """The 12-layer, 41M model of enwik8: 400,000 steps of 22 sequences of 512 with as much memory; 4 GPUs.

    Adam 2.5e-4, cosine, clipping 0.25, dropout 0.1. Published: 1.06 bits per byte with
    `evaluate RUN --length 80 --memory-length 2100 --clamp-length 820 --same-length`.

    python -m ctx_jax train transformer_xl:enwik8_base --text FOLDER
    """
    return Experiment(
        name="transformer-xl-enwik8-base",
        data=Data(
            reader=Lanes(512, join_documents=True),
            corpus=TextFiles(Path("text")),
            tokenizer=Bytes(),
            batch_size=22,
            evaluation_batch_size=1,
        ),
        model=TransformerXLConfig(vocabulary_size=263, dtype="bfloat16"),
        objective=Segment(),
        optimizer=Adam(schedule=WarmUp(rate=2.5e-4, decay="cosine")),
        training=Training(steps=400_000, evaluate_every=4_000, checkpoint_every=4_000, log_every=100),
    )


def wikitext103_base() -> Experiment:
    """The 16-layer, 151M model of WikiText-103: 200,000 steps of 60 sequences of 150, adaptive softmax; 4 GPUs.

    Published: perplexity 24.0 (per word) with
    `evaluate RUN --length 64 --memory-length 640 --clamp-length 400 --same-length`.

    python -m ctx_jax train transformer_xl:wikitext103_base --text FOLDER
    """
    return Experiment(
        name="transformer-xl-wt103-base",
        data=Data(
            reader=Lanes(150, join_documents=True),
            corpus=TextFiles(Path("text")),
            tokenizer=Words(267_741),
            batch_size=60,
            evaluation_batch_size=1,
        ),
        model=TransformerXLConfig(
            vocabulary_size=267_741,
            width=410,
            layers=16,
            heads=10,
            feed_forward=2100,
            memory_length=150,
            cutoffs=(20_000, 40_000, 200_000),
            dtype="bfloat16",
        ),
        objective=Segment(),
        optimizer=Adam(schedule=WarmUp(rate=2.5e-4, decay="cosine")),
        training=Training(steps=200_000, evaluate_every=4_000, checkpoint_every=4_000, log_every=100),
    )


def wikitext103_large() -> Experiment:
    """The 18-layer model of WikiText-103 (the paper's 257M; its settings count 285M): 64 TPU cores.

    4,000,000 steps of 128 sequences of 384, dropout 0.2; Adam 2.5e-4 after 16,000 steps of warm-up, cosine.
    Published: perplexity 18.3 (per word) with
    `evaluate RUN --length 128 --memory-length 1600 --clamp-length 1000 --same-length`.
    """
    small = wikitext103_base()
    return replace(
        small,
        name="transformer-xl-wt103-large",
        data=replace(small.data, reader=Lanes(384, join_documents=True), batch_size=128),
        model=replace(
            small.model,
            width=1024,
            layers=18,
            heads=16,
            feed_forward=4096,
            memory_length=384,
            embedding_divisor=4,
            untie_biases=True,
            dropout=0.2,
            attention_dropout=0.2,
        ),
        optimizer=Adam(schedule=WarmUp(rate=2.5e-4, warmup=16_000, decay="cosine", from_start=True)),
        training=replace(small.training, steps=4_000_000),
    )
