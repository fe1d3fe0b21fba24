"""Numbers of parameters of the published models, by shape evaluation alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig

LARGE: dict[str, Any] = {"width": 1024, "layers": 24, "heads": 16, "feed_forward": 4096}
ROBERTA: dict[str, Any] = {"vocabulary_size": 50265, "position_offset": 2, "epsilon": 1e-5}
HEADLESS: dict[str, Any] = {"segments": 0, "pooler": False, "classes": None}


def count(config: BertConfig | GptConfig, method: str) -> int:
    """Parameters that a method of the model touches: "__call__" those below the heads, "initialize" all."""
    batch = {name: jax.ShapeDtypeStruct((1, 2), jnp.int32) for name in ("tokens", "documents", "positions")}
    model = config.build()
    shapes = jax.eval_shape(lambda batch: model.init(jax.random.key(0), batch, method=method), batch)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("options", "encoder", "whole"),
    [
        pytest.param({}, 109_482_240, 110_106_428, id="BERT base"),
        pytest.param(LARGE, 335_141_888, 336_226_108, id="BERT large"),
        pytest.param(ROBERTA | HEADLESS, None, 124_696_665, id="RoBERTa base"),
        pytest.param(ROBERTA | HEADLESS | LARGE, None, 355_411_033, id="RoBERTa large"),
        pytest.param(HEADLESS | {"layers": 6}, 66_362_880, 66_985_530, id="DistilBERT"),
    ],
)
def test_bert(options: dict[str, Any], encoder: int | None, whole: int):
    config = BertConfig(vocabulary_multiple=1, **options)
    assert encoder in (None, count(config, "__call__"))
    assert whole == count(config, "initialize")


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        pytest.param({"vocabulary_size": 40478, "max_length": 512, "norm": "post"}, 116_534_784, id="GPT"),
        pytest.param({}, 124_439_808, id="GPT-2 124M"),
        pytest.param({"width": 1024, "layers": 24, "heads": 16, "feed_forward": 4096}, 354_823_168, id="GPT-2 355M"),
        pytest.param({"width": 1280, "layers": 36, "heads": 20, "feed_forward": 5120}, 774_030_080, id="GPT-2 774M"),
        pytest.param({"width": 1600, "layers": 48, "heads": 25, "feed_forward": 6400}, 1_557_611_200, id="GPT-2 1558M"),
        pytest.param({"classes": 3, "token_classes": 5}, 124_439_808 + 3 * 768 + 5 * 769, id="GPT-2 with heads"),
        pytest.param({"attention_pattern": ("dense", "local")}, 124_439_808, id="the pattern has no parameters"),
    ],
)
def test_gpt(options: dict[str, Any], parameters: int):
    assert count(GptConfig(vocabulary_multiple=1, **options), "initialize") == parameters


def test_a_padded_vocabulary_adds_rows_only():
    added = (50304 - 50257) * 768
    assert count(GptConfig(), "initialize") == 124_439_808 + added
