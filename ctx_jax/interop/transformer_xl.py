"""Transformer-XL, read only: as Hugging Face published it last (`TransfoXLLMHeadModel`), and the state_dict of the
original PyTorch code's `MemTransformerLM`.

The two have the same names, but the original's have no prefix, and its softmax has the tails' columns in reverse. The
original has no config.json either: write one with Hugging Face's fields: "model_type": "transfo-xl", "untie_r": false,
vocab_size, and its arguments n_layer, n_head, d_model, d_head, d_inner, d_embed, div_val, cutoffs (without 0 and the
vocabulary's size), tie_projs, mem_len, clamp_len, same_length, pre_lnorm, dropout, dropatt.
"""

from __future__ import annotations

from ctx_jax.interop.family import Family, Parts
from ctx_jax.interop.fields import Fields
from ctx_jax.interop.layout import BACK, BACKWARDS, INTO, SAME, Rule, linear, norm, table, together
from ctx_jax.models.transformer_xl import TransformerXLConfig

OURS = "stack/layers/"
LAYER = "{prefix}layers.{}."


def rules(config: TransformerXLConfig, parts: Parts) -> list[Rule]:
    bands = range(len(config.cutoffs) + 1)
    bounds = (0, *config.cutoffs, config.vocabulary_size)
    sizes = [bounds[band + 1] - bounds[band] for band in bands]
    groups = [(band,) for band in bands] if config.embedding_divisor != 1 else [tuple(bands)]
    found = projections(config)
    for number, group in enumerate(groups):
        embeddings, biases = (
            tuple(f"vocabulary/tables_{band}/{leaf}" for band in group) for leaf in ("embedding", "bias")
        )
        rows = table(*(sizes[band] for band in group))
        layer = f"crit.out_layers.{number}"
        names = (f"{{prefix}}word_emb.emb_layers.{number}.weight", f"{layer}.weight")
        found += [Rule(names, embeddings, rows), Rule((f"{layer}.bias",), biases, rows)]
    if config.cutoffs:
        order = BACKWARDS if "original" in parts else SAME
        found += [
            Rule(("crit.cluster_weight",), ("vocabulary/tails/embedding",), order),
            Rule(("crit.cluster_bias",), ("vocabulary/tails/bias",), order),
        ]
    fused = tuple(f"{OURS}attention/{name}/kernel" for name in ("query", "key", "value"))
    return [
        *found,
        *attention_biases(config),
        Rule((f"{LAYER}dec_attn.qkv_net.weight",), fused, together(INTO, 0)),
        Rule((f"{LAYER}dec_attn.r_net.weight",), (f"{OURS}attention/position/kernel",), INTO),
        Rule((f"{LAYER}dec_attn.o_net.weight",), (f"{OURS}attention/output/kernel",), BACK),
        *norm(f"{LAYER}dec_attn.layer_norm", f"{OURS}attention_norm"),
        *linear(f"{LAYER}pos_ff.CoreNet.0", f"{OURS}feed_forward/input"),
        *linear(f"{LAYER}pos_ff.CoreNet.3", f"{OURS}feed_forward/output"),
        *norm(f"{LAYER}pos_ff.layer_norm", f"{OURS}feed_forward_norm"),
    ]


def projections(config: TransformerXLConfig) -> list[Rule]:
    """Between the bands' widths and the model's: the softmax's are the embedding's but for the head's, or its own."""
    divided = config.embedding_divisor != 1
    if not divided and config.embedding_width in (None, config.width):
        return []
    bands = range(len(config.cutoffs) + 1)
    tied = [band for band in bands if band and config.tie_projections]
    found = []
    for band in bands if divided else [0]:
        copies = [f"crit.out_projs.{other}" for other in tied if other == band or not divided]
        theirs = (f"{{prefix}}word_emb.emb_projs.{band}", *copies)
        found.append(Rule(theirs, (f"vocabulary/input_projections_{band}/kernel",), INTO))
    for band in bands:
        if band not in tied:
            found.append(Rule((f"crit.out_projs.{band}",), (f"vocabulary/output_projections_{band}/kernel",), INTO))
    return found


def attention_biases(config: TransformerXLConfig) -> list[Rule]:
    """u and v; shared ones come with their copies in every layer."""
    found = []
    for theirs, ours in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
        if config.untie_biases:
            found.append(Rule((f"{LAYER}dec_attn.{theirs}",), (f"{OURS}attention/{ours}",)))
        else:
            copies = (f"{{prefix}}layers.{layer}.dec_attn.{theirs}" for layer in range(config.layers))
            found.append(Rule((f"{{prefix}}{theirs}", *copies), (ours,)))
    return found


def read(fields: Fields, parts: Parts) -> TransformerXLConfig:
    fields.only(attn_type=0, sample_softmax=-1, adaptive=True, tie_word_embeddings=True)
    width, heads = fields.integer("d_model", 1024), fields.size("n_head", 16)
    if fields.integer("d_head", 64) != width // heads:
        raise fields.refuse("d_head", f"has d_model / n_head, {width // heads}")
    cutoffs = fields.raw("cutoffs", [20000, 40000, 200000])
    if not isinstance(cutoffs, list) or not all(isinstance(cutoff, int) for cutoff in cutoffs):
        raise fields.refuse("cutoffs", "needs a list of whole numbers there")
    shared = fields.flag("proj_share_all_but_first", True)
    tied = fields.raw("tie_projs", [False] + [shared] * len(cutoffs))
    if tied not in ([False] + [choice] * len(cutoffs) for choice in (True, False)):
        raise fields.refuse("tie_projs", f"ties all but the first or none: {len(cutoffs) + 1} values")
    embedding = fields.integer("d_embed", 1024)
    clamp = fields.integer("clamp_len", 1000)
    return TransformerXLConfig(
        vocabulary_size=fields.integer("vocab_size", 267735),
        width=width,
        layers=fields.integer("n_layer", 18),
        heads=heads,
        feed_forward=fields.integer("d_inner", 4096),
        memory_length=fields.integer("mem_len", 1600),
        same_length=fields.flag("same_length", True),
        clamp_length=clamp if clamp > 0 else None,
        norm="pre" if fields.flag("pre_lnorm", False) else "post",
        untie_biases=fields.flag("untie_r", True),
        cutoffs=tuple(cutoffs),
        embedding_width=None if embedding == width else embedding,
        embedding_divisor=fields.integer("div_val", 4),
        tie_projections=tied[-1] if cutoffs else True,
        dropout=fields.number("dropout", 0.1),
        attention_dropout=fields.number("dropatt", 0.0),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
    )


TRANSFORMER_XL = Family(
    model_type="transfo-xl",
    prefix="transformer.",
    config=TransformerXLConfig,
    kinds={"TransfoXLLMHeadModel": frozenset(), "MemTransformerLM": frozenset({"original"})},
    marks={"original": ("word_emb.", "crit.")},
    read=read,
    rules=rules,
    buffers=r"pos_emb\.inv_freq",
)
