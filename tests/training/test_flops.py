from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.training.flops import causal_pairs, train_flops_per_token

SMALL = {"vocabulary_size": 640, "width": 256, "layers": 2, "heads": 2, "feed_forward": 1024, "scan": False}


def test_gpt2_by_the_rule_of_six():
    """6 per parameter in matrices and token table, and 6 L D (T + 1) for the half of the pairs that is not masked."""
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768
    expected = 6 * matrices + 6 * 12 * 768 * 1025
    assert train_flops_per_token(GptConfig(), 1024) == pytest.approx(expected)


def test_bert_counts_the_predicted_positions_only():
    every, few = (train_flops_per_token(BertConfig(), 128, targets) for targets in (128, 20))
    assert every - few == pytest.approx(6 * 108 / 128 * (768 * 768 + 768 * 30522))


def test_causal_pairs():
    for length, window in ((5, 5), (6, 2), (4, 9), (3, 1)):
        naive = sum(1 for i in range(length) for j in range(length) if 0 <= i - j < window)
        assert causal_pairs(length, window) == naive


@pytest.mark.parametrize(
    ("config", "targets", "masked"),
    [
        (BertConfig(**SMALL, max_length=64, classes=None, pooler=False, dropout=0.0, attention_dropout=0.0), 8, 0),
        (GptConfig(**SMALL, max_length=64, dropout=0.0, attention_dropout=0.0), 64, 64 * 63 // 2),
        (TransformerXLConfig(**SMALL, memory_length=32, dropout=0.0), 64, 64 * 63 // 2),
        (XLNetConfig(**SMALL, memory_length=32, reuse_length=None, dropout=0.0, attention_dropout=0.0), 8, 0),
    ],
    ids=["bert", "gpt", "transformer_xl", "xlnet"],
)
def test_xla_counts_the_same(config, targets, masked):
    """The compiler's count of the traced gradient, which also has the masked pairs and all elementwise work. The
    vocabulary's chunks are a loop, of which it counts one round, so there is one chunk."""
    rows, length = 16, 64
    model = config.build()
    batch = {name: jnp.ones((rows, length), jnp.int32) for name in ("tokens", "documents", "positions")}
    batch["target_positions"] = jnp.tile(jnp.arange(targets), (rows, 1))
    if isinstance(config, XLNetConfig):
        batch["ranks"] = jnp.tile(jnp.arange(length), (rows, 1))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="initialize"))
    memory = jax.eval_shape(lambda: model.init_memory(rows))

    def loss(params, memory):
        output = model.apply(params, batch, memory)
        hidden = output.hidden[:, :targets] if output.query is None else output.query
        ones = jnp.ones((rows, targets))
        return model.apply(params, hidden, ones.astype(jnp.int32), ones, method="score").total

    counted = jax.jit(jax.grad(loss)).lower(params, memory).cost_analysis()["flops"]
    products = 3 if hasattr(config, "clamp_length") else 2
    extra = 3 * masked * products * 2 * config.width * config.layers / length
    expected = train_flops_per_token(config, length, targets) + extra
    assert counted / (rows * length) == pytest.approx(expected, rel=0.08)


def test_local_layers_adaptive_tables_and_unknown_models():
    local = replace(GptConfig(), attention_pattern=("dense", "local"), band=128)
    saved = 6 * 2 * 768 * 6 * (causal_pairs(1024, 1024) - causal_pairs(1024, 128)) / 1024
    assert train_flops_per_token(GptConfig(), 1024) - train_flops_per_token(local, 1024) == pytest.approx(saved)
    plain = TransformerXLConfig(vocabulary_size=1000)
    adaptive = replace(plain, cutoffs=(100, 500), embedding_divisor=2)
    saved = 6 * 512 * (1000 - 102) - 12 * 512 * 512
    assert train_flops_per_token(plain, 512) - train_flops_per_token(adaptive, 512) == pytest.approx(saved)
    with pytest.raises(TypeError, match="operations of int are not known"):
        train_flops_per_token(replace(BertConfig()).layers, 128)
