"""GPT (Radford et al. 2018), GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, arXiv 2005.14165).

The papers' text (BooksCorpus, WebText, CommonCrawl) is not public: give your own, --text FOLDER.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.readers import Blocks
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE
from ctx_jax.experiment import Data, Experiment
from ctx_jax.models.gpt import GptConfig
from ctx_jax.objectives.causal import Causal
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.schedules import WarmUp


def tiny() -> Experiment:
    """GPT-2's architecture on the speeches, for a laptop's CPU: about a minute.

    python -m ctx_jax train gpt:tiny
    """
    return Experiment(
        name="gpt-tiny",
        data=Data(reader=Blocks(128), tokenizer=SentencePiece(2048), batch_size=4, evaluation_batch_size=16),
        model=GptConfig(
            vocabulary_size=2048,
            width=128,
            layers=2,
            heads=4,
            feed_forward=512,
            max_length=256,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        objective=Causal(),
        optimizer=AdamW(schedule=WarmUp(rate=2e-3, warmup=40, decay="cosine")),
        training=Training(steps=600, evaluate_every=200, checkpoint_every=200),
    )


def gpt() -> Experiment:
    """GPT: 117M parameters, 100 epochs of BooksCorpus at 64 sequences of 512; 8 P600 GPUs for a month.

    Section 4.1: Adam with a maximum of 2.5e-4, 2,000 steps of warm-up, cosine to 0; weight decay 0.01 on all non-bias,
    non-gain weights; dropout 0.1. Published: perplexity 18.4 on BooksCorpus.

    python -m ctx_jax train gpt:gpt --text FOLDER
    """
    return Experiment(
        name="gpt",
        data=Data(
            reader=Blocks(512, join_documents=True),
            corpus=TextFiles(Path("text")),
            tokenizer=SentencePiece(40_478, model_type="bpe"),
            batch_size=64,
        ),
        model=GptConfig(
            vocabulary_size=40_478,
            max_length=512,
            norm="post",
            residual_scaling=False,
            position_std=0.02,
            dtype="bfloat16",
        ),
        objective=Causal(),
        optimizer=AdamW(schedule=WarmUp(rate=2.5e-4, warmup=2_000, decay="cosine")),
        training=Training(steps=2_400_000, evaluate_every=10_000, checkpoint_every=10_000, log_every=100),
    )


def gpt2() -> Experiment:
    """GPT-2 small (the paper's 117M, 124M in truth): 512 sequences of 1,024; its steps and rate are unpublished.

    Section 2.3 gives the batch and the context; the schedule here is GPT-3's for its smallest model. Published: 29.41
    perplexity on WikiText-2, zero-shot (table 3).

    python -m ctx_jax train gpt:gpt2 --text FOLDER --mesh.fsdp 8
    """
    return Experiment(
        name="gpt2",
        data=Data(
            reader=Blocks(1024, join_documents=True),
            corpus=TextFiles(Path("text")),
            tokenizer=ByteLevelBPE(50_257),
            batch_size=512,
        ),
        model=GptConfig(dtype="bfloat16"),
        objective=Causal(),
        optimizer=AdamW(schedule=WarmUp(rate=6e-4, warmup=700, decay="cosine", final=0.1), b2=0.95, weight_decay=0.1),
        training=Training(steps=600_000, evaluate_every=2_000, checkpoint_every=2_000, log_every=100),
    )


def gpt2_medium() -> Experiment:
    """GPT-2 of 24 layers (the paper's 345M, 355M in truth). Published: 22.76 on WikiText-2."""
    return _sized("gpt2-medium", width=1024, layers=24, heads=16)


def gpt2_large() -> Experiment:
    """GPT-2 of 36 layers (the paper's 762M, 774M in truth). Published: 19.93 on WikiText-2."""
    return _sized("gpt2-large", width=1280, layers=36, heads=20)


def gpt2_xl() -> Experiment:
    """GPT-2 of 48 layers (the paper's 1542M, 1558M in truth). Published: 18.34 on WikiText-2."""
    return _sized("gpt2-xl", width=1600, layers=48, heads=25)


def _sized(name: str, width: int, layers: int, heads: int) -> Experiment:
    small = gpt2()
    model = replace(small.model, width=width, layers=layers, heads=heads, feed_forward=4 * width, remat=True)
    return replace(small, name=name, model=model)


def gpt3_small() -> Experiment:
    """GPT-3 small (125M, table 2.1): dense and locally banded layers in turn, context 2,048, 0.5M tokens a batch.

    Adam 0.9 / 0.95 / 1e-8, clipping 1, decay 0.1, 375M tokens of warm-up, cosine to 10 % over 260 of 300 billion
    tokens (appendix B); no dropout is named. Published: LAMBADA 42.7 % zero-shot (table 3.2).

    python -m ctx_jax train gpt:gpt3_small --text FOLDER --mesh.fsdp 8
    """
    schedule = WarmUp(rate=6e-4, warmup=715, decay="cosine", final=0.1, steps=496_000)
    base = gpt2()
    return replace(
        base,
        name="gpt3-small",
        data=replace(base.data, reader=Blocks(2048, join_documents=True), batch_size=256),
        model=replace(
            base.model, max_length=2048, attention_pattern=("dense", "local"), dropout=0.0, attention_dropout=0.0
        ),
        optimizer=AdamW(schedule=schedule, b2=0.95, weight_decay=0.1),
        training=replace(base.training, steps=572_000),
    )


def gpt3_medium() -> Experiment:
    """GPT-3 medium (350M, table 2.1)."""
    return _gpt3("gpt3-medium", layers=24, width=1024, heads=16, batch_size=256, rate=3e-4)


def gpt3_large() -> Experiment:
    """GPT-3 large (760M, table 2.1)."""
    return _gpt3("gpt3-large", layers=24, width=1536, heads=16, batch_size=256, rate=2.5e-4)


def gpt3_xl() -> Experiment:
    """GPT-3 XL (1.3B, table 2.1), with 16 heads of 128: the printed 24 do not fit the width."""
    return _gpt3("gpt3-xl", layers=24, width=2048, heads=16, batch_size=512, rate=2e-4)


def gpt3_2_7b() -> Experiment:
    """GPT-3 2.7B (table 2.1)."""
    return _gpt3("gpt3-2.7b", layers=32, width=2560, heads=32, batch_size=512, rate=1.6e-4)


def gpt3_6_7b() -> Experiment:
    """GPT-3 6.7B (table 2.1)."""
    return _gpt3("gpt3-6.7b", layers=32, width=4096, heads=32, batch_size=1024, rate=1.2e-4)


def gpt3_13b() -> Experiment:
    """GPT-3 13B (table 2.1), of width 5,120: the printed 5,140 is no multiple of its 40 heads of 128."""
    return _gpt3("gpt3-13b", layers=40, width=5120, heads=40, batch_size=1024, rate=1e-4)


def gpt3_175b() -> Experiment:
    """GPT-3 175B (table 2.1), 3.2M tokens a batch. Published: LAMBADA 76.2 % zero-shot (table 3.2)."""
    return _gpt3("gpt3-175b", layers=96, width=12_288, heads=96, batch_size=1_600, rate=0.6e-4)


def _gpt3(name: str, layers: int, width: int, heads: int, batch_size: int, rate: float) -> Experiment:
    """As `gpt3_small`, with as many tokens in all: a larger batch has fewer steps, of warm-up too."""
    small = gpt3_small()
    fewer = batch_size / small.data.batch_size
    schedule = WarmUp(rate=rate, warmup=round(715 / fewer), decay="cosine", final=0.1, steps=round(496_000 / fewer))
    model = replace(small.model, width=width, layers=layers, heads=heads, feed_forward=4 * width, remat=True)
    return replace(
        small,
        name=name,
        data=replace(small.data, batch_size=batch_size),
        model=model,
        optimizer=replace(small.optimizer, schedule=schedule),
        training=replace(small.training, steps=round(572_000 / fewer)),
    )
