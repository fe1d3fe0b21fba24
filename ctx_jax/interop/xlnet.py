"""XLNet as Hugging Face names it, and as its authors do (zihangdai/xlnet).

Its `bi_data` reads half of a batch backwards; here that is said by each batch (`reversed`), so either value is read and
False is written. xlnet_config.json has sizes only: memory, dropout and clamping are those of `XLNetConfig`. Its "gelu"
is GELU by tanh, as that code computes it; Hugging Face's is by erf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ctx_jax.interop.bundles import read_checkpoint
from ctx_jax.interop.family import ACTIVATIONS, OPTIMIZER, Family, Parts, needs, needs_heads, task_heads, token_heads
from ctx_jax.interop.fields import Fields, their_name
from ctx_jax.interop.layout import HEADS_LAST, Rule, dense, layer_norm, linear, norm, reshaped, table
from ctx_jax.models.xlnet import XLNetConfig

OURS = "stack/layers/"
LAYER = "{prefix}layer.{}."
ATTENTION = {
    "q": "query/kernel",
    "k": "key/kernel",
    "v": "value/kernel",
    "r": "position/kernel",
    "r_w_bias": "content_bias",
    "r_r_bias": "position_bias",
    "r_s_bias": "segment_bias",
    "seg_embed": "segment_embedding",
}


def rules(config: XLNetConfig, parts: Parts) -> list[Rule]:
    size = config.vocabulary_size
    return [
        Rule(("{prefix}word_embedding.weight", "lm_loss.weight"), ("tokens/embedding",), table(size)),
        Rule(("{prefix}mask_emb",), ("query_embedding",), reshaped(1, 1)),
        *(Rule((f"{LAYER}rel_attn.{name}",), (f"{OURS}attention/{ours}",)) for name, ours in ATTENTION.items()),
        Rule((f"{LAYER}rel_attn.o",), (f"{OURS}attention/output/kernel",), HEADS_LAST),
        *norm(f"{LAYER}rel_attn.layer_norm", f"{OURS}attention_norm"),
        *linear(f"{LAYER}ff.layer_1", f"{OURS}feed_forward/input"),
        *linear(f"{LAYER}ff.layer_2", f"{OURS}feed_forward/output"),
        *norm(f"{LAYER}ff.layer_norm", f"{OURS}feed_forward_norm"),
        Rule(("lm_loss.bias",), ("head_bias",), table(size), "lm"),
        *linear("sequence_summary.summary", "pooler", part="sequence"),
        *linear("logits_proj", "classifier", part="sequence"),
        *token_heads(),
    ]


def checkpoint_rules(config: XLNetConfig, parts: Parts) -> list[Rule]:
    """Biases and segment embeddings are one tensor for all layers."""
    words, body = table(config.vocabulary_size), "model/transformer/"
    layer, attention = f"{body}layer_{{}}/", f"{OURS}attention/"
    kernels = {theirs: ours for theirs, ours in ATTENTION.items() if ours.endswith("kernel")}
    return [
        Rule((f"{body}word_embedding/lookup_table",), ("tokens/embedding",), words),
        Rule((f"{body}mask_emb/mask_emb",), ("query_embedding",), reshaped(1, 1)),
        *(Rule((f"{layer}rel_attn/{theirs}/kernel",), (f"{attention}{ours}",)) for theirs, ours in kernels.items()),
        *(
            Rule((f"{body}{theirs}",), (f"{attention}{ours}",))
            for theirs, ours in ATTENTION.items()
            if theirs not in kernels
        ),
        Rule((f"{layer}rel_attn/o/kernel",), (f"{attention}output/kernel",), HEADS_LAST),
        *layer_norm(f"{layer}rel_attn/LayerNorm", f"{OURS}attention_norm"),
        *dense(f"{layer}ff/layer_1", f"{OURS}feed_forward/input"),
        *dense(f"{layer}ff/layer_2", f"{OURS}feed_forward/output"),
        *layer_norm(f"{layer}ff/LayerNorm", f"{OURS}feed_forward_norm"),
        Rule(("model/lm_loss/bias",), ("head_bias",), words, "lm"),
    ]


def read_checkpoint_config(fields: Fields, parts: Parts) -> XLNetConfig:
    fields.only(untie_r=True)
    width, heads = fields.integer("d_model"), fields.size("n_head")
    fields.same("d_head", width // heads, width // heads, "d_model / n_head")
    return XLNetConfig(
        vocabulary_size=fields.integer("n_token"),
        width=width,
        layers=fields.integer("n_layer"),
        heads=heads,
        feed_forward=fields.integer("d_inner"),
        activation=fields.choice("ff_activation", {"gelu": "gelu_tanh", "relu": "relu"}, "relu"),
    )


def read(fields: Fields, parts: Parts) -> XLNetConfig:
    if "lm" in parts:
        fields.only(tie_word_embeddings=True)
    if "sequence" in parts:
        fields.only(summary_type="last", summary_use_proj=True, summary_activation="tanh", summary_proj_to_labels=False)
    fields.only(untie_r=True, same_length=False)
    for name in ("bi_data", "use_mems_eval", "use_mems_train"):
        fields.flag(name, False)
    width, heads = fields.integer("d_model", 1024), fields.size("n_head", 16)
    fields.same("d_head", width // heads, width // heads, "d_model / n_head")
    clamp = fields.integer("clamp_len", -1)
    dropout = fields.number("dropout", 0.1)
    return XLNetConfig(
        vocabulary_size=fields.integer("vocab_size", 32000),
        width=width,
        layers=fields.integer("n_layer", 24),
        heads=heads,
        feed_forward=fields.integer("d_inner", 4096),
        memory_length=0 if fields.raw("mem_len", 512) is None else fields.integer("mem_len", 512),
        reuse_length=None if fields.raw("reuse_len", None) in (None, 0) else fields.integer("reuse_len"),
        clamp_length=clamp if clamp > 0 else None,
        causal=fields.choice("attn_type", {"bi": False, "uni": True}, "bi"),
        activation=fields.choice("ff_activation", ACTIVATIONS, "gelu"),
        dropout=dropout,
        attention_dropout=dropout,
        epsilon=fields.number("layer_norm_eps", 1e-12),
        pooler="sequence" in parts,
        **task_heads(fields, parts),
    )


def write(config: XLNetConfig, parts: Parts) -> dict[str, Any]:
    needs(config, "XLNet, whose rates are one,", attention_dropout=config.dropout)
    needs_heads(config, parts)
    return {
        "vocab_size": config.vocabulary_size,
        "d_model": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "d_head": config.width // config.heads,
        "d_inner": config.feed_forward,
        "mem_len": config.memory_length or None,
        "reuse_len": config.reuse_length,
        "clamp_len": config.clamp_length or -1,
        "attn_type": "uni" if config.causal else "bi",
        "bi_data": False,
        "same_length": False,
        "untie_r": True,
        "ff_activation": their_name(ACTIVATIONS, config.activation, "activation", "XLNet"),
        "dropout": config.dropout,
        "layer_norm_eps": config.epsilon,
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
        "tie_word_embeddings": True,
    }


XLNET = Family(
    model_type="xlnet",
    prefix="transformer.",
    config=XLNetConfig,
    kinds={
        "XLNetLMHeadModel": frozenset({"lm"}),
        "XLNetForSequenceClassification": frozenset({"sequence"}),
        "XLNetForTokenClassification": frozenset({"token"}),
        "XLNetForQuestionAnsweringSimple": frozenset({"answer"}),
        "XLNetModel": frozenset(),
    },
    marks={
        "lm": ("lm_loss.bias",),
        "sequence": ("logits_proj.", "sequence_summary."),
        "token": ("classifier.",),
        "answer": ("qa_outputs.",),
    },
    read=read,
    rules=rules,
    write=write,
    ignored="tie_word_embeddings summary_type summary_use_proj summary_activation summary_proj_to_labels",
)
XLNET_CHECKPOINT = replace(
    XLNET,
    config_file="xlnet_config.json",
    read_tensors=read_checkpoint,
    prefix="",
    kinds={kind: XLNET.kinds[kind] for kind in ("XLNetLMHeadModel", "XLNetModel")},
    marks={"lm": ("model/lm_loss/",)},
    read=read_checkpoint_config,
    rules=checkpoint_rules,
    write=None,
    buffers=OPTIMIZER,
)
