"""OpenAI GPT and GPT-2 as Hugging Face names them; their linear maps are Conv1Ds, [inputs, outputs]."""

from __future__ import annotations

from typing import Any

from ctx_jax.interop.family import ACTIVATIONS, Family, Parts, needs, needs_heads, task_heads, token_heads
from ctx_jax.interop.fields import Fields, their_name
from ctx_jax.interop.layout import CONV_BACK, CONV_INTO, FLAT, INTO, Rule, linear, norm, table, together
from ctx_jax.models.gpt import GptConfig

BLOCK = "stack/layers/blocks_0/"
LAYER = "{prefix}h.{}."
OLD_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
"""Of the first GPT, whose "gelu" is the one by tanh."""


def rules(config: GptConfig, tokens: str, positions: str) -> list[Rule]:
    fused = ("query", "key", "value")
    return [
        Rule((f"{{prefix}}{tokens}.weight", "lm_head.weight"), ("tokens/embedding",), table(config.vocabulary_size)),
        Rule((f"{{prefix}}{positions}.weight",), ("positions/embedding",)),
        *norm(f"{LAYER}ln_1", f"{BLOCK}attention_norm"),
        Rule(
            (f"{LAYER}attn.c_attn.weight",),
            tuple(f"{BLOCK}attention/{name}/kernel" for name in fused),
            together(CONV_INTO, 1),
        ),
        Rule(
            (f"{LAYER}attn.c_attn.bias",), tuple(f"{BLOCK}attention/{name}/bias" for name in fused), together(FLAT, 0)
        ),
        *linear(f"{LAYER}attn.c_proj", f"{BLOCK}attention/output", CONV_BACK),
        *norm(f"{LAYER}ln_2", f"{BLOCK}feed_forward_norm"),
        *linear(f"{LAYER}mlp.c_fc", f"{BLOCK}feed_forward/input", CONV_INTO),
        *linear(f"{LAYER}mlp.c_proj", f"{BLOCK}feed_forward/output", CONV_BACK),
        Rule(("score.weight",), ("classifier/kernel",), INTO, "sequence"),
        *token_heads(),
    ]


def gpt_rules(config: GptConfig, parts: Parts) -> list[Rule]:
    return rules(config, "tokens_embed", "positions_embed")


def gpt2_rules(config: GptConfig, parts: Parts) -> list[Rule]:
    return [*rules(config, "wte", "wpe"), *norm("{prefix}ln_f", "final_norm")]


def read(fields: Fields, parts: Parts, vocabulary: int, positions: int, **rest: Any) -> GptConfig:
    width = fields.integer("n_embd", 768)
    inner = fields.raw("n_inner", None)
    dropout = fields.number("resid_pdrop", 0.1)
    fields.same("embd_pdrop", dropout, 0.1, "resid_pdrop")
    fields.only(tie_word_embeddings=True)
    return GptConfig(
        vocabulary_size=fields.integer("vocab_size", vocabulary),
        width=width,
        layers=fields.integer("n_layer", 12),
        heads=fields.integer("n_head", 12),
        feed_forward=4 * width if inner is None else fields.integer("n_inner"),
        max_length=fields.integer("n_positions", positions),
        dropout=dropout,
        attention_dropout=fields.number("attn_pdrop", 0.1),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
        **task_heads(fields, parts),
        **rest,
    )


def read_gpt(fields: Fields, parts: Parts) -> GptConfig:
    activation = fields.choice("afn", OLD_ACTIVATIONS, "gelu")
    rest: dict[str, Any] = {"norm": "post", "residual_scaling": False, "position_std": 0.02}
    return read(fields, parts, 40478, 512, activation=activation, **rest)


def read_gpt2(fields: Fields, parts: Parts) -> GptConfig:
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_new")
    fields.only(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        # the same numbers in fp32, in another order
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
    )
    return read(fields, parts, 50257, 1024, activation=activation)


def write(config: GptConfig, parts: Parts, model: str) -> dict[str, Any]:
    needs_heads(config, parts)
    if set(config.attention_pattern) != {"dense"} or len(config.attention_pattern) > 1:
        raise ValueError(
            f"attention_pattern {config.attention_pattern} cannot be exported: {model} has dense layers alone"
        )
    return {
        "vocab_size": config.vocabulary_size,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.max_length,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.epsilon,
        "tie_word_embeddings": True,
    }


def write_gpt(config: GptConfig, parts: Parts) -> dict[str, Any]:
    needs(config, "GPT", norm="post", feed_forward=4 * config.width)
    return {**write(config, parts, "GPT"), "afn": their_name(OLD_ACTIVATIONS, config.activation, "activation", "GPT")}


def write_gpt2(config: GptConfig, parts: Parts) -> dict[str, Any]:
    needs(config, "GPT-2", norm="pre")
    activation = their_name({"gelu_new": "gelu_tanh", **ACTIVATIONS}, config.activation, "activation", "GPT-2")
    return {**write(config, parts, "GPT-2"), "n_inner": config.feed_forward, "activation_function": activation}


SUMMARY = "summary_type summary_use_proj summary_activation summary_proj_to_labels n_ctx"
LEGACY = r"h\.\d+\.attn\.(bias|masked_bias)"
GPT = Family(
    model_type="openai-gpt",
    prefix="transformer.",
    config=GptConfig,
    kinds={
        "OpenAIGPTLMHeadModel": frozenset(),
        "OpenAIGPTForSequenceClassification": frozenset({"sequence"}),
        "OpenAIGPTModel": frozenset(),
    },
    marks={"sequence": ("score.",)},
    read=read_gpt,
    rules=gpt_rules,
    write=write_gpt,
    ignored=f"{SUMMARY} n_special predict_special_tokens",
    buffers=rf"{LEGACY}|position_ids",
)
GPT2 = Family(
    model_type="gpt2",
    prefix="transformer.",
    config=GptConfig,
    kinds={
        "GPT2LMHeadModel": frozenset(),
        "GPT2ForSequenceClassification": frozenset({"sequence"}),
        "GPT2ForTokenClassification": frozenset({"token"}),
        "GPT2ForQuestionAnswering": frozenset({"answer"}),
        "GPT2Model": frozenset(),
    },
    marks={"sequence": ("score.",), "token": ("classifier.",), "answer": ("qa_outputs.",)},
    read=read_gpt2,
    rules=gpt2_rules,
    write=write_gpt2,
    ignored=SUMMARY,
    buffers=LEGACY,
)
