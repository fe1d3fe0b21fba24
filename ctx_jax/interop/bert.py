"""BERT, RoBERTa and DistilBERT as Hugging Face names them, and BERT as its authors do (google-research/bert).

In bert_config.json "gelu" is read as GELU by erf, with which the published weights were trained and with which Hugging
Face reads them; that code's head computes it by tanh: write "gelu_new" for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ctx_jax.interop.bundles import read_checkpoint
from ctx_jax.interop.family import ACTIVATIONS, OPTIMIZER, Family, Parts, needs, needs_heads, task_heads, token_heads
from ctx_jax.interop.fields import Fields, their_name
from ctx_jax.interop.layout import BACK, CONV_BACK, INTO, Form, Rule, dense, layer_norm, linear, norm, table, zeros
from ctx_jax.models.bert import BertConfig

EMBEDDINGS = "{prefix}embeddings."
LAYERS = "stack/layers/"


def embeddings(config: BertConfig, decoder: str) -> list[Rule]:
    """`decoder` is the name of the tensor that is tied to the token table."""
    rules = [
        Rule((f"{EMBEDDINGS}word_embeddings.weight", decoder), ("tokens/embedding",), table(config.vocabulary_size)),
        Rule((f"{EMBEDDINGS}position_embeddings.weight",), ("positions/embedding",)),
        *norm(f"{EMBEDDINGS}LayerNorm", "embedding_norm"),
    ]
    if config.segments:
        rules.append(Rule((f"{EMBEDDINGS}token_type_embeddings.weight",), ("segments/embedding",)))
    return rules


def layers(names: dict[str, str], linear: Any = linear, norm: Any = norm, back: Form = BACK) -> list[Rule]:
    """The encoder's layers, from our names to theirs; linear maps, `back` from the heads, and LayerNorms as told."""
    theirs = {ours: "{prefix}" + name for ours, name in names.items()}
    return [
        *(rule for name in ("query", "key", "value") for rule in linear(theirs[name], f"{LAYERS}attention/{name}")),
        *linear(theirs["output"], f"{LAYERS}attention/output", back),
        *norm(theirs["attention_norm"], f"{LAYERS}attention_norm"),
        *linear(theirs["in"], f"{LAYERS}feed_forward/input"),
        *linear(theirs["out"], f"{LAYERS}feed_forward/output"),
        *norm(theirs["feed_forward_norm"], f"{LAYERS}feed_forward_norm"),
    ]


ENCODER = {
    ours: f"encoder.layer.{{}}.{theirs}"
    for ours, theirs in {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "in": "intermediate.dense",
        "out": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }.items()
}
CHECKPOINT = {
    ours: f"bert/{theirs.replace('.', '/').replace('layer/{}', 'layer_{}')}" for ours, theirs in ENCODER.items()
}
TRANSFORMER = {
    ours: f"transformer.layer.{{}}.{theirs}"
    for ours, theirs in {
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "in": "ffn.lin1",
        "out": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    }.items()
}


def lm_head(config: BertConfig, dense: str, normed: str, *bias: str) -> list[Rule]:
    """What stands before the decoder, and its bias."""
    return [
        *linear(dense, "head/dense", part="lm"),
        *norm(normed, "head/norm", part="lm"),
        Rule(bias, ("head/bias",), table(config.vocabulary_size), "lm"),
    ]


def bert_rules(config: BertConfig, parts: Parts) -> list[Rule]:
    predictions = "cls.predictions."
    return [
        *embeddings(config, f"{predictions}decoder.weight"),
        *layers(ENCODER),
        *linear("{prefix}pooler.dense", "pooler", part="pooler"),
        *lm_head(
            config,
            f"{predictions}transform.dense",
            f"{predictions}transform.LayerNorm",
            f"{predictions}bias",
            f"{predictions}decoder.bias",
        ),
        *linear("cls.seq_relationship", "classifier", part="pair"),
        *linear("classifier", "classifier", part="sequence"),
        *token_heads(),
    ]


def checkpoint_rules(config: BertConfig, parts: Parts) -> list[Rule]:
    words, predictions = table(config.vocabulary_size), "cls/predictions/"

    def classifier(scope: str, part: str, ours: str = "classifier") -> list[Rule]:
        return [
            Rule((f"{scope}output_weights",), (f"{ours}/kernel",), INTO, part),
            Rule((f"{scope}output_bias",), (f"{ours}/bias",), part=part),
        ]

    return [
        Rule(("bert/embeddings/word_embeddings",), ("tokens/embedding",), words),
        Rule(("bert/embeddings/position_embeddings",), ("positions/embedding",)),
        Rule(("bert/embeddings/token_type_embeddings",), ("segments/embedding",)),
        *layer_norm("bert/embeddings/LayerNorm", "embedding_norm"),
        *layers(CHECKPOINT, dense, layer_norm, CONV_BACK),
        *dense("bert/pooler/dense", "pooler", part="pooler"),
        *dense(f"{predictions}transform/dense", "head/dense", part="lm"),
        *layer_norm(f"{predictions}transform/LayerNorm", "head/norm", part="lm"),
        Rule((f"{predictions}output_bias",), ("head/bias",), words, "lm"),
        *classifier("cls/seq_relationship/", "pair"),
        *classifier("", "sequence"),
        *classifier("cls/squad/", "answer", "token_classifier"),
    ]


def roberta_rules(config: BertConfig, parts: Parts) -> list[Rule]:
    rules = [
        *embeddings(config, "lm_head.decoder.weight"),
        *layers(ENCODER),
        *linear("{prefix}pooler.dense", "pooler", part="pooler"),
        *lm_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.bias"),
        *linear("classifier.dense", "pooler", part="sequence"),
        *linear("classifier.out_proj", "classifier", part="sequence"),
        *token_heads(),
    ]
    if not config.segments:
        rules.append(Rule((f"{EMBEDDINGS}token_type_embeddings.weight",), (), zeros(1, config.width)))
    return rules


def distilbert_rules(config: BertConfig, parts: Parts) -> list[Rule]:
    return [
        *embeddings(config, "vocab_projector.weight"),
        *layers(TRANSFORMER),
        *lm_head(config, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        *linear("pre_classifier", "pooler", part="sequence"),
        *linear("classifier", "classifier", part="sequence"),
        *token_heads(),
    ]


def heads(fields: Fields, parts: Parts) -> dict[str, Any]:
    """The parts as fields of our config."""
    pair = {"classes": 2} if "pair" in parts else {}
    return {"pooler": bool(parts & {"pooler", "sequence"}), **task_heads(fields, parts), **pair}


def read_bert(fields: Fields, parts: Parts) -> BertConfig:
    if "lm" in parts:
        fields.only(tie_word_embeddings=True)
    fields.only(position_embedding_type="absolute", directionality="bidi", pooler_type="first_token_transform")
    fields.only(is_decoder=False, add_cross_attention=False)
    return BertConfig(
        vocabulary_size=fields.integer("vocab_size", 30522),
        width=fields.integer("hidden_size", 768),
        layers=fields.integer("num_hidden_layers", 12),
        heads=fields.integer("num_attention_heads", 12),
        feed_forward=fields.integer("intermediate_size", 3072),
        max_length=fields.integer("max_position_embeddings", 512),
        segments=fields.integer("type_vocab_size", 2),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        dropout=fields.number("hidden_dropout_prob", 0.1),
        attention_dropout=fields.number("attention_probs_dropout_prob", 0.1),
        epsilon=fields.number("layer_norm_eps", 1e-12),
        **heads(fields, parts),
    )


def read_roberta(fields: Fields, parts: Parts) -> BertConfig:
    config = read_bert(fields, parts)
    if "lm" in parts and config.activation != "gelu":
        raise fields.refuse("hidden_act", "has the LM head's activation everywhere, and RoBERTa's head has gelu")
    offset = fields.integer("pad_token_id", 1) + 1
    return replace(config, position_offset=offset, max_length=config.max_length - offset)


def read_distilbert(fields: Fields, parts: Parts) -> BertConfig:
    if "lm" in parts:
        fields.only(tie_word_embeddings=True, tie_weights_=True)
    fields.only(sinusoidal_pos_embds=False)
    return BertConfig(
        vocabulary_size=fields.integer("vocab_size", 30522),
        width=fields.integer("dim", 768),
        layers=fields.integer("n_layers", 6),
        heads=fields.integer("n_heads", 12),
        feed_forward=fields.integer("hidden_dim", 3072),
        max_length=fields.integer("max_position_embeddings", 512),
        segments=0,
        activation=fields.choice("activation", ACTIVATIONS, "gelu"),
        dropout=fields.number("dropout", 0.1),
        attention_dropout=fields.number("attention_dropout", 0.1),
        pooler_activation="relu" if "sequence" in parts else "tanh",
        **heads(fields, parts),
    )


def check_heads(config: BertConfig, parts: Parts, model: str) -> None:
    """Raises ValueError if the model lacks one of the parts."""
    if parts & {"pooler", "sequence"}:
        needs(config, model, pooler=True, pooler_activation="relu" if model == "DistilBERT" else "tanh")
    if "pair" in parts:
        needs(config, f"the next-sentence head of {model}", classes=2)
    needs_heads(config, parts)


def write_bert(config: BertConfig, parts: Parts, model: str = "BERT") -> dict[str, Any]:
    if model == "BERT":
        needs(config, model, position_offset=0)
        if not config.segments:
            raise ValueError("segments 0 cannot be exported: BERT has 1 or more (DistilBERT and RoBERTa have none)")
    check_heads(config, parts, model)
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.max_length + config.position_offset,
        "type_vocab_size": config.segments or 1,
        "hidden_act": their_name(ACTIVATIONS, config.activation, "activation", model),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.epsilon,
        "tie_word_embeddings": True,
    }


def write_roberta(config: BertConfig, parts: Parts) -> dict[str, Any]:
    if "lm" in parts:
        needs(config, "the LM head of RoBERTa", activation="gelu")
    if not config.position_offset:
        raise ValueError("position_offset 0 cannot be exported: RoBERTa's is the padding id and 1 more")
    return {**write_bert(config, parts, "RoBERTa"), "pad_token_id": config.position_offset - 1}


def write_distilbert(config: BertConfig, parts: Parts) -> dict[str, Any]:
    needs(config, "DistilBERT", segments=0, position_offset=0, epsilon=1e-12)
    check_heads(config, parts, "DistilBERT")
    return {
        "vocab_size": config.vocabulary_size,
        "dim": config.width,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "hidden_dim": config.feed_forward,
        "max_position_embeddings": config.max_length,
        "activation": their_name(ACTIVATIONS, config.activation, "activation", "DistilBERT"),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "sinusoidal_pos_embds": False,
        "tie_word_embeddings": True,
    }


def without_zero_segments(config: BertConfig, params: dict[str, Any]) -> tuple[BertConfig, dict[str, Any]]:
    """RoBERTa has one segment, and its vector was never trained: a zero is left out, another one stays."""
    if config.segments != 1 or np.any(params["segments/embedding"]):
        return config, params
    rest = {path: value for path, value in params.items() if path != "segments/embedding"}
    return replace(config, segments=0), rest


POOLER_SIZES = "pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head"
BERT = Family(
    model_type="bert",
    prefix="bert.",
    config=BertConfig,
    kinds={
        "BertForPreTraining": frozenset({"pooler", "lm", "pair"}),
        "BertForMaskedLM": frozenset({"lm"}),
        "BertForNextSentencePrediction": frozenset({"pooler", "pair"}),
        "BertForSequenceClassification": frozenset({"pooler", "sequence"}),
        "BertForTokenClassification": frozenset({"token"}),
        "BertForQuestionAnswering": frozenset({"answer"}),
        "BertModel": frozenset({"pooler"}),
    },
    marks={
        "pooler": ("{}pooler.",),
        "lm": ("cls.predictions.",),
        "pair": ("cls.seq_relationship.",),
        "sequence": ("classifier.", "{}pooler."),
        "token": ("classifier.",),
        "answer": ("qa_outputs.",),
    },
    rivals=("sequence", "token"),
    read=read_bert,
    rules=bert_rules,
    write=write_bert,
    ignored=f"tie_word_embeddings {POOLER_SIZES}",
    buffers=r"embeddings\.position_ids",
)
BERT_CHECKPOINT = replace(
    BERT,
    config_file="bert_config.json",
    read_tensors=read_checkpoint,
    prefix="",
    marks={
        "pooler": ("bert/pooler/",),
        "lm": ("cls/predictions/",),
        "pair": ("cls/seq_relationship/",),
        "sequence": ("output_weights",),
        "answer": ("cls/squad/",),
    },
    rules=checkpoint_rules,
    write=None,
    buffers=OPTIMIZER,
)
ROBERTA = Family(
    model_type="roberta",
    prefix="roberta.",
    config=BertConfig,
    kinds={
        "RobertaForMaskedLM": frozenset({"lm"}),
        "RobertaForSequenceClassification": frozenset({"sequence"}),
        "RobertaForTokenClassification": frozenset({"token"}),
        "RobertaForQuestionAnswering": frozenset({"answer"}),
        "RobertaModel": frozenset({"pooler"}),
    },
    marks={
        "pooler": ("{}pooler.",),
        "lm": ("lm_head.",),
        "sequence": ("classifier.out_proj.",),
        "token": ("classifier.weight",),
        "answer": ("qa_outputs.",),
    },
    read=read_roberta,
    rules=roberta_rules,
    write=write_roberta,
    ignored="tie_word_embeddings",
    buffers=r"embeddings\.position_ids",
    simplify=without_zero_segments,
)
DISTILBERT = Family(
    model_type="distilbert",
    prefix="distilbert.",
    config=BertConfig,
    kinds={
        "DistilBertForMaskedLM": frozenset({"lm"}),
        "DistilBertForSequenceClassification": frozenset({"sequence"}),
        "DistilBertForTokenClassification": frozenset({"token"}),
        "DistilBertForQuestionAnswering": frozenset({"answer"}),
        "DistilBertModel": frozenset(),
    },
    marks={
        "lm": ("vocab_",),
        "sequence": ("pre_classifier.",),
        "token": ("classifier.",),
        "answer": ("qa_outputs.",),
    },
    rivals=("sequence", "token"),
    read=read_distilbert,
    rules=distilbert_rules,
    write=write_distilbert,
    ignored="tie_word_embeddings tie_weights_",
    buffers=r"embeddings\.position_ids",
)
