from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.objectives.permutation import Permutation
from ctx_jax.objectives.spans import Spans
from ctx_jax.objectives.supervised import Supervised
from ctx_jax.objectives.tags import Tags
from ctx_jax.training.flops import (
    causal_pairs,
    forward_flops_per_token,
    permuted_pairs,
    step_flops_per_token,
    train_flops_per_token,
)

SMALL = {"vocabulary_size": 640, "width": 256, "layers": 2, "heads": 2, "feed_forward": 1024, "scan": False}


def test_gpt2_by_the_rule_of_six():
    """6 per parameter in matrices and token table, and 6 L D (T + 1) for the half of the pairs that is not masked."""
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768
    expected = 6 * matrices + 6 * 12 * 768 * 1025
    assert train_flops_per_token(GptConfig(), 1024) == pytest.approx(expected)


def test_bert_counts_the_predicted_positions_only():
    every, few = (train_flops_per_token(BertConfig(), 128, targets) for targets in (128, 20))
    assert every - few == pytest.approx(6 * 108 / 128 * (768 * 768 + 768 * 30522))


def test_bert_base_by_hand():
    """6 per weight that a position meets, the head's at 76 of 512 positions, and two products for each of 512 keys."""
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    head = 76 / 512 * (768 * 768 + 768 * 30522)
    expected = 6 * (matrices + head) + 6 * 12 * 2 * 768 * 512
    assert train_flops_per_token(BertConfig(), 512, 76) == pytest.approx(expected)
    assert forward_flops_per_token(BertConfig(), 512, 76) == pytest.approx(expected / 3)


def test_distillation_by_hand():
    """A student of six layers, forward and backward, and the teacher forward, both with logits of all 128 positions, or
    of the 20 masked ones."""
    square, table, pairs = 768 * 768, 768 * 30522, 2 * 768 * 128
    layer = 4 * square + 8 * square + pairs
    few, every = (count / 128 * (square + table) for count in (20, 128))
    student, objective = replace(BertConfig(), layers=6), Distillation(teacher=BertConfig())
    expected = 6 * (6 * layer + every) + 2 * (12 * layer + every)
    assert step_flops_per_token(student, objective, 128, 20) == pytest.approx(expected)
    expected = 6 * (6 * layer + few) + 2 * (12 * layer + few)
    assert step_flops_per_token(student, replace(objective, masked_only=True), 128, 20) == pytest.approx(expected)


def test_labels_need_no_vocabulary_but_for_an_auxiliary_loss():
    layers = train_flops_per_token(GptConfig(), 64, targets=0)
    assert layers == pytest.approx(6 * 12 * (12 * 768 * 768 + 768 * 65))
    for objective, targets in ((Tags(), 64), (Spans(), 2), (Supervised(), 32)):
        assert step_flops_per_token(GptConfig(), objective, 64, targets) == layers
    auxiliary = step_flops_per_token(GptConfig(), Supervised(language_model=0.5), 64)
    assert auxiliary - layers == pytest.approx(6 * 768 * 50257)
    assert step_flops_per_token(GptConfig(), Supervised(both_orders=True), 64) == 2 * layers
    xlnet = replace(XLNetConfig(), memory_length=0)  # all layers' content stream, for the head reads it
    expected = 6 * 12 * (4 * 768 * 768 + 2 * 768 * 3072 + 3 * 768 * 128)
    assert step_flops_per_token(xlnet, Supervised(), 128, 32) == pytest.approx(expected)
    block = step_flops_per_token(XLNetConfig(), Permutation(num_predict=4, perm_size=8), 16, 4)
    assert block == train_flops_per_token(XLNetConfig(), 16, 4, block=8)


def test_transformer_xl_by_hand():
    """enwik8's base: three products for each of 512 remembered keys and, on average, 256.5 of the window; the
    memory's keys and values have no gradient of the inputs. With `same_length` there are 512 keys for every query."""
    matrices = 12 * (4 * 512 * 512 + 2 * 512 * 2048) + 512 * 204
    memory = 12 * 2 * 512 * 512
    pair = 12 * 3 * 512
    config = TransformerXLConfig()
    expected = 6 * matrices + 4 * memory + 6 * pair * (512 + 256.5)
    assert train_flops_per_token(config, 512) == pytest.approx(expected)
    expected = 2 * matrices + 2 * memory + 2 * pair * (512 + 256.5)
    assert forward_flops_per_token(config, 512) == pytest.approx(expected)
    assert forward_flops_per_token(replace(config, same_length=True), 512) == pytest.approx(expected - 2 * pair * 256.5)
    shorter = forward_flops_per_token(config, 64)  # its memory is eight windows
    assert shorter == pytest.approx(2 * matrices + 16 * memory + 2 * pair * (512 + 32.5))


def test_xlnet_by_hand():
    """Two layers: the content stream's second gives only keys and values. 4 of 16 positions are targets, in one block,
    so that a row's 16 queries see 12 positions each and the targets 1 + 2 + 3 + 4 (or 0 + 1 + 2 + 3) of each other."""
    config = XLNetConfig(vocabulary_size=100, width=8, layers=2, heads=2, feed_forward=32, memory_length=8)
    square, feed_forward, pair = 8 * 8, 2 * 8 * 32, 3 * 8
    content = 16 * (2 * square + feed_forward) + pair * (16 * 8 + 16 * 12 + 10)
    query = 4 * (2 * square + feed_forward) + pair * (4 * 8 + 4 * 12 + 6)
    window = content + 2 * query + 2 * 16 * 2 * square + 4 * 8 * 100
    memory = 2 * 8 * 2 * square
    assert train_flops_per_token(config, 16, 4) == pytest.approx((6 * window + 4 * memory) / 16)
    assert forward_flops_per_token(config, 16, 4) == pytest.approx((2 * window + 2 * memory) / 16)
    # in two blocks of 8 with 2 targets each, 6 are seen of one's own and 8 of an earlier one
    blocks = 2 * (8 * 6 + 3) + 8 * 8, 2 * (2 * 6 + 1) + 2 * 8
    fewer = 16 * 12 + 10 - blocks[0] + 2 * (4 * 12 + 6 - blocks[1])
    saved = train_flops_per_token(config, 16, 4) - train_flops_per_token(config, 16, 4, block=8)
    assert saved == pytest.approx(6 * pair * fewer / 16)
    causal = replace(config, causal=True)
    window = 2 * (16 * (4 * square + feed_forward) + pair * (16 * 8 + 136)) + 16 * 8 * 100
    assert train_flops_per_token(causal, 16) == pytest.approx((6 * window + 4 * memory) / 16)


@pytest.mark.parametrize(("targets", "block"), [(5, 32), (6, 16), (8, 8)])
def test_permuted_pairs_are_those_of_the_ranks(targets: int, block: int):
    """Ranks as objectives/permutation.py gives them: a block's context comes before its targets, which are ordered."""
    chance, ranks, places = np.random.default_rng(0), [], []
    for start in range(0, 32, block):
        rank = np.zeros(block, int)
        chosen = chance.permutation(block)[: targets * block // 32]
        rank[chosen] = 1 + chance.permutation(block)[: len(chosen)]
        ranks += list(start // block * (block + 1) + rank)
        places += list(start + chosen)
    rank = np.array(ranks)
    content = (rank[None] <= rank[:, None]).sum()
    query = (rank[None] < rank[places][:, None]).sum()
    assert permuted_pairs(32, targets, block) == (content, query)


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
        # allowed: 3,620 of 64 x 64 pairs in the one content stream that is needed, 476 of 8 x 64 in each query stream
        (
            XLNetConfig(**SMALL, memory_length=32, reuse_length=None, dropout=0.0, attention_dropout=0.0),
            8,
            (64 * 64 - 3620 + 2 * (8 * 64 - 476)) // 2,
        ),
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


def test_distances_beyond_the_clamp_are_one():
    """Queries 0 to 3 see 3, 4, 5 and 6 keys behind a memory of 2: of these, 3 distances at most, the clamp of 2 among
    them. With `same_length` each sees 2 keys."""
    config = TransformerXLConfig(**SMALL, memory_length=2)
    plain, clamped, near = (forward_flops_per_token(replace(config, clamp_length=n), 4) for n in (None, 2, 5))
    assert plain == near
    assert plain - clamped == pytest.approx(2 * config.width * config.layers * (3 + 4 + 5 + 6 - 4 * 3) / 4)
    assert train_flops_per_token(config, 4) == train_flops_per_token(replace(config, clamp_length=2), 4)
    same = replace(config, same_length=True)
    saved = forward_flops_per_token(same, 4) - forward_flops_per_token(replace(same, clamp_length=1), 4)
    assert saved == 0  # distances 0 and 1


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
