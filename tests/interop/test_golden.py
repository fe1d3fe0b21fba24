"""The recorded originals, read by us: configurations as they were meant, and the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctx_jax.interop import import_folder
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from tests.golden.compare import CASES, HERE, compared, load_record

BERT = {"vocabulary_size": 61, "width": 24, "layers": 2, "heads": 3, "feed_forward": 40, "max_length": 19}
WIDE = {**BERT, "vocabulary_size": 47, "width": 32, "layers": 3, "heads": 2}
DISTILBERT = {"vocabulary_size": 53, "width": 20, "layers": 3, "heads": 2, "feed_forward": 36, "max_length": 17}
GPT = {"vocabulary_size": 59, "width": 24, "layers": 3, "heads": 2, "feed_forward": 96, "max_length": 15}
FIRST = {"norm": "post", "residual_scaling": False, "position_std": 0.02}
XLNET = {"vocabulary_size": 43, "width": 24, "layers": 2, "heads": 3, "feed_forward": 40}
XL = {"vocabulary_size": 30, "width": 16, "layers": 2, "heads": 2, "feed_forward": 28, "memory_length": 6}
PLAIN = {"segments": 0, "pooler": False, "classes": None}
TASK = {"width": 12, "layers": 2, "feed_forward": 20}
BERT_TASK = {**BERT, **PLAIN, **TASK, "segments": 2}
ROBERTA_TASK = {**BERT_TASK, "segments": 1, "position_offset": 2, "max_length": 17}
DISTILBERT_TASK = {**DISTILBERT, **PLAIN, **TASK}
GPT_TASK = {**GPT, **TASK, "feed_forward": 48}
XLNET_TASK = {**XLNET, **TASK, "memory_length": 0, "reuse_length": None, "activation": "gelu"}


def config(kind: Any, *fields: dict[str, Any], **more: Any) -> Any:
    return kind(**{name: value for some in (*fields, more) for name, value in some.items()})


CONFIGS = {
    "bert_pretraining": config(BertConfig, BERT),
    "bert_classification": config(BertConfig, WIDE, activation="gelu_tanh", epsilon=1e-5, classes=3),
    "roberta_lm": config(
        BertConfig, BERT, PLAIN, max_length=17, position_offset=2, epsilon=1e-5, segments=1, classes=None
    ),
    "roberta_classification": config(BertConfig, WIDE, PLAIN, max_length=18, position_offset=1, pooler=True, classes=4),
    "distilbert_lm": config(BertConfig, DISTILBERT, PLAIN),
    "distilbert_classification": config(
        BertConfig,
        DISTILBERT,
        PLAIN,
        width=32,
        heads=4,
        layers=2,
        activation="relu",
        pooler=True,
        pooler_activation="relu",
        classes=2,
    ),
    "gpt_lm": config(GptConfig, GPT, FIRST),
    "gpt_relu": config(
        GptConfig, GPT, FIRST, width=30, heads=5, layers=2, feed_forward=120, activation="relu", epsilon=1e-3
    ),
    "gpt2_lm": config(GptConfig, GPT, feed_forward=50),
    "gpt2_erf": config(GptConfig, GPT, width=30, heads=5, layers=2, feed_forward=120, activation="gelu"),
    "xlnet_lm": config(XLNetConfig, XLNET, memory_length=9, reuse_length=6, activation="gelu"),
    "xlnet_both_directions": config(
        XLNetConfig, XLNET, width=32, heads=2, memory_length=16, reuse_length=None, clamp_length=8
    ),
    "xlnet_causal_classification": config(
        XLNetConfig,
        XLNET,
        memory_length=0,
        reuse_length=None,
        causal=True,
        activation="relu",
        pooler=True,
        classes=3,
    ),
    "bert_tokens": config(BertConfig, BERT_TASK, token_classes=5),
    "bert_answers": config(BertConfig, BERT_TASK, token_classes=2),
    "roberta_tokens": config(BertConfig, ROBERTA_TASK, token_classes=3),
    "roberta_answers": config(BertConfig, ROBERTA_TASK, token_classes=2),
    "distilbert_tokens": config(BertConfig, DISTILBERT_TASK, token_classes=4),
    "distilbert_answers": config(BertConfig, DISTILBERT_TASK, token_classes=2),
    "gpt_classification": config(GptConfig, GPT_TASK, FIRST, classes=3),
    "gpt2_classification": config(GptConfig, GPT_TASK, classes=4),
    "gpt2_tokens": config(GptConfig, GPT_TASK, token_classes=3),
    "gpt2_answers": config(GptConfig, GPT_TASK, token_classes=2),
    "xlnet_tokens": config(XLNetConfig, XLNET_TASK, token_classes=5),
    "xlnet_answers": config(XLNetConfig, XLNET_TASK, token_classes=2),
    "transformer_xl_divided": config(
        TransformerXLConfig,
        XL,
        cutoffs=(6, 14),
        embedding_divisor=2,
        clamp_length=5,
        same_length=True,
        untie_biases=True,
    ),
    "transformer_xl_shared": config(
        TransformerXLConfig, XL, cutoffs=(6, 14), embedding_width=12, memory_length=4, norm="pre"
    ),
    "transformer_xl_original": config(
        TransformerXLConfig, XL, cutoffs=(6, 14), embedding_divisor=2, clamp_length=4, same_length=True
    ),
    "transformer_xl_original_plain": config(TransformerXLConfig, XL, width=24, heads=3, memory_length=5),
}


def test_every_case_is_recorded():
    assert set(CASES) == set(CONFIGS)


@pytest.mark.parametrize("name", CASES)
def test_the_originals_are_reproduced(name: str):
    """fp32: each value within 1e-4, within 1e-5 in the mean; the loss is a sum, so relative."""
    imported = import_folder(HERE / name)
    assert imported.config == CONFIGS[name]
    values = compared(imported, load_record(HERE / name))
    kinds = {one.name.rpartition("/")[2] for one in values}
    assert "layers" in kinds and kinds & {"logits", "log_probabilities", "classes", "token_classes"}
    assert any(one.name.startswith("gradient/") for one in values)
    for one in values:
        assert np.abs(one.theirs).max() > 0.1  # nothing agrees by being small
        if one.name == "loss":
            np.testing.assert_allclose(one.ours, one.theirs, rtol=1e-6)
        else:
            assert one.error.max() < 1e-4 and one.error.mean() < 1e-5, one.name
