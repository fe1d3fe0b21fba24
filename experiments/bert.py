"""BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa (Liu et al. 2019, arXiv 1907.11692) and DistilBERT (Sanh et al.
2019, arXiv 1910.01108).

The papers' BooksCorpus is not public: give your own text, --text FOLDER.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.experiment import Data, Experiment
from ctx_jax.models.bert import BertConfig
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.objectives.masked import Masked
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import AdamW, BertAdam
from ctx_jax.training.schedules import WarmUp


def tiny() -> Experiment:
    """BERT's architecture and data (masked LM and next-sentence prediction) on the speeches, for a laptop's CPU.

    python -m ctx_jax train bert:tiny
    """
    return Experiment(
        name="bert-tiny",
        data=Data(reader=Pairs(128), tokenizer=SentencePiece(2048), batch_size=4, evaluation_batch_size=16),
        model=BertConfig(
            vocabulary_size=2048,
            width=128,
            layers=2,
            heads=4,
            feed_forward=512,
            max_length=256,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        objective=Masked(max_predictions=20, relation=1.0),
        optimizer=AdamW(schedule=WarmUp(rate=1e-3, warmup=40)),
        training=Training(steps=600, evaluate_every=200, checkpoint_every=200),
    )


def base() -> Experiment:
    """BERT base, first phase: 900,000 of 1,000,000 steps of 256 sequences of 128 (appendix A.2); 4 days on 16 TPUs.

    Adam 1e-4, decay 0.01, 10,000 steps of warm-up, linear decay over the million steps, without bias correction.
    Published: GLUE 79.6, SQuAD 1.1 F1 88.5. Its second phase is `base_512`.

    python -m ctx_jax train bert:base --text FOLDER --run runs/bert-base-128
    """
    return Experiment(
        name="bert-base-128",
        data=Data(reader=Pairs(128), corpus=TextFiles(Path("text")), tokenizer=WordPiece(30_522), batch_size=256),
        model=BertConfig(dtype="bfloat16"),
        objective=Masked(max_predictions=20, relation=1.0),
        optimizer=BertAdam(schedule=WarmUp(rate=1e-4, warmup=10_000, steps=1_000_000, from_start=True)),
        training=Training(steps=900_000, evaluate_every=10_000, checkpoint_every=10_000, log_every=100),
    )


def base_512() -> Experiment:
    """BERT base, second phase: the last 100,000 steps at length 512, to learn the positions beyond 128.

    python -m ctx_jax train bert:base_512 --continue runs/bert-base-128 --text FOLDER
    """
    first = base()
    return replace(
        first,
        name="bert-base-512",
        data=replace(first.data, reader=Pairs(512)),
        objective=replace(first.objective, max_predictions=76),
        training=replace(first.training, steps=1_000_000),
    )


def large() -> Experiment:
    """BERT large, first phase; 4 days on 64 TPUs. Published: GLUE 82.1, SQuAD 1.1 F1 90.9.

    python -m ctx_jax train bert:large --text FOLDER
    """
    small = base()
    model = replace(small.model, width=1024, layers=24, heads=16, feed_forward=4096)
    return replace(small, name="bert-large-128", model=model)


def large_512() -> Experiment:
    """BERT large, second phase, as `base_512`."""
    return replace(base_512(), name="bert-large-512", model=large().model)


def roberta_base() -> Experiment:
    """RoBERTa base: 500,000 steps of 8,000 full-sentence sequences of 512, dynamic masking (table 9).

    Adam 6e-4, b2 0.98, epsilon 1e-6, decay 0.01, no clipping, 24,000 steps of warm-up, linear decay. The large model
    took a day on 1,024 V100s for its first 100,000 steps. Published: MNLI-m 87.6, SST-2 94.8 (base).

    python -m ctx_jax train bert:roberta_base --text FOLDER --mesh.fsdp 8 --training.accumulation 4
    """
    return Experiment(
        name="roberta-base",
        data=Data(
            reader=Sentences(512), corpus=TextFiles(Path("text")), tokenizer=ByteLevelBPE(50_265), batch_size=8_000
        ),
        model=BertConfig(
            vocabulary_size=50_265,
            position_offset=2,
            segments=0,
            pooler=False,
            classes=None,
            epsilon=1e-5,
            dtype="bfloat16",
        ),
        objective=Masked(max_predictions=77),
        optimizer=AdamW(schedule=WarmUp(rate=6e-4, warmup=24_000), b2=0.98, epsilon=1e-6, clip=None),
        training=Training(steps=500_000, evaluate_every=5_000, checkpoint_every=5_000, log_every=100),
    )


def roberta_large() -> Experiment:
    """RoBERTa large: as `roberta_base`, 4e-4 after 30,000 steps of warm-up (table 9). Published: MNLI-m 90.2."""
    small = roberta_base()
    return replace(
        small,
        name="roberta-large",
        model=replace(small.model, width=1024, layers=24, heads=16, feed_forward=4096),
        optimizer=replace(small.optimizer, schedule=WarmUp(rate=4e-4, warmup=30_000)),
    )


def distil() -> Experiment:
    """DistilBERT: half of the layers of the run that --from names, taught by it; 90 hours on 8 16 GB V100s (section 3).

    The published code's recipe: Adam 5e-4 without decay, b2 0.98, epsilon 1e-6, clip 5, 5 % of warm-up, linear decay,
    masked positions drawn by count^-0.7, batches of about 4,000 sequences, three passes over Wikipedia and BooksCorpus.
    Published: GLUE 77.0, of the teacher's 79.5, with 60 % of its parameters.

    python -m ctx_jax train bert:distil --from runs/bert-base-512 --text FOLDER --training.accumulation 8
    """
    return Experiment(
        name="distilbert",
        data=Data(reader=Sentences(512), corpus=TextFiles(Path("text")), tokenizer=WordPiece(30_522), batch_size=4_000),
        model=replace(base().model, layers=6, segments=0, pooler=False, classes=None),
        objective=Distillation(teacher=base_512().model, rarity=0.7),
        optimizer=AdamW(schedule=WarmUp(rate=5e-4, share=0.05), b2=0.98, epsilon=1e-6, clip=5.0, weight_decay=0.0),
        training=Training(steps=50_000, evaluate_every=1_000, checkpoint_every=1_000, log_every=100),
    )
