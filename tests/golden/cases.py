"""The tiny models of which there are records, and how each original is read. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One tiny model and what it reads: windows of batches as in `ctx_jax.contract`, one unless there is a memory."""

    kind: str
    config: dict[str, Any]
    table: str
    """The tensor of whose gradient there is a record: the token embedding, tied to the softmax where there is one."""
    read: Callable[[Any, Arrays, Any], dict[str, Any]]
    """(model, batch, memory) -> tensors "layers" [B, L + 1, T, D], "logits" or "log_probabilities", "classes",
    "token_classes", "memory"; those that there are."""
    length: int = 13
    rows: int = 3
    windows: int = 1
    padding: str = "right"
    """Where rows are padded: right, left or nowhere."""
    pad: int = 0
    segments: int = 0
    targets: int = 0
    """Predicted places of a permutation; 0 = there is none."""
    reversed: bool = False
    std: float = 0.25
    files: str = "safetensors"
    """How the tensors are kept: safetensors, shards, bin, or old (the format before PyTorch 1.6)."""
    changes: dict[str, float] = field(default_factory=dict)
    """Tensors that are multiplied after drawing."""


def head(model: Any, y: Any) -> dict[str, Any]:
    """What the head gave; of an answer's start and end both in one."""
    if "start_logits" in y:
        return {"token_classes": torch.stack([y.start_logits, y.end_logits], -1)}
    if y.logits.ndim == 2:
        return {"classes": y.logits}
    return {"token_classes" if "TokenClassification" in type(model).__name__ else "logits": y.logits}


def encoder(model: Any, batch: Arrays, memory: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"token_type_ids": torch.tensor(batch["segments"])} if "segments" in batch else {}
    mask = torch.tensor(batch["documents"] != 0).long()
    y = model(input_ids=torch.tensor(batch["tokens"]), attention_mask=mask, output_hidden_states=True, **arguments)
    found = {"layers": torch.stack(y.hidden_states, 1)}
    if "seq_relationship_logits" in y:
        return found | {"logits": y.prediction_logits, "classes": y.seq_relationship_logits}
    return found | head(model, y)


def decoder(model: Any, batch: Arrays, memory: Any) -> dict[str, Any]:
    """The last layer is the residual stream, before GPT-2's final LayerNorm."""
    raw: list[Any] = []
    take = lambda module, inputs, output: raw.append(output[0] if isinstance(output, (tuple, list)) else output)  # noqa: E731
    hook = model.transformer.h[-1].register_forward_hook(take)
    mask = torch.tensor(batch["documents"] != 0).long()
    y = model(input_ids=torch.tensor(batch["tokens"]), attention_mask=mask, output_hidden_states=True)
    hook.remove()
    return {"layers": torch.stack([*y.hidden_states[:-1], raw[0]], 1), **head(model, y)}


def xlnet(model: Any, batch: Arrays, memory: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if "ranks" in batch:
        ranks = torch.tensor(batch["ranks"])
        blocked = (ranks[:, None, :] >= ranks[:, :, None]) & (ranks[:, None, :] > 0)
        places = torch.nn.functional.one_hot(torch.tensor(batch["target_positions"]), ranks.shape[1])
        arguments = {"perm_mask": blocked.float(), "target_mapping": places.float()}
    if not batch["documents"].all():  # a causal model fails with any mask
        arguments["attention_mask"] = torch.tensor(batch["documents"] != 0).float()
    y = model(
        input_ids=torch.tensor(batch["tokens"]),
        token_type_ids=torch.tensor(batch["segments"]),
        mems=memory,
        use_mems=bool(model.config.mem_len),
        output_hidden_states=True,
        **arguments,
    )
    content = y.hidden_states[::2] if "ranks" in batch else y.hidden_states
    found = {"layers": torch.stack(content, 1), **head(model, y)}
    return found | ({"memory": y.mems} if model.config.mem_len else {})


def transformer_xl(model: Any, batch: Arrays, memory: Any) -> dict[str, Any]:
    y = model(torch.tensor(batch["tokens"]), mems=memory, output_hidden_states=True)
    return {
        "layers": torch.stack(y.hidden_states, 1),
        "log_probabilities": y.prediction_scores,
        "memory": y.mems,
    }


def original(model: Any, batch: Arrays, memory: Any) -> dict[str, Any]:
    """The code gives losses alone, so each token in turn is the target. Layers are the inputs of those after them."""
    tokens = torch.tensor(batch["tokens"]).T.contiguous()
    layers: list[Any] = []
    hooks = [layer.register_forward_hook(lambda *a: layers.append(a[2])) for layer in model.layers]
    model.crit.keep_order = True
    hidden, memory = model._forward(tokens, mems=memory or model.init_mems())
    flat = hidden.reshape(-1, hidden.shape[-1])
    every = [-model.crit(flat, torch.full(flat.shape[:1], v)) for v in range(model.n_token)]
    for hook in hooks:
        hook.remove()
    scores = torch.stack(every, -1).reshape(*hidden.shape[:2], -1)
    stacked = torch.stack([model.word_emb(tokens), *layers])
    return {
        "layers": stacked.permute(2, 0, 1, 3),
        "log_probabilities": scores.transpose(0, 1),
        "memory": memory,
    }


BERT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 19,
}
BERT_WIDE = {**BERT, "vocab_size": 47, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
DISTILBERT = {
    "vocab_size": 53,
    "dim": 20,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 36,
    "max_position_embeddings": 17,
}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
GPT = {**NO_IDS, "vocab_size": 59, "n_positions": 15, "n_embd": 24, "n_layer": 3, "n_head": 2}
XLNET = {**NO_IDS, "vocab_size": 43, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 40, "untie_r": True}
TRANSFORMER_XL = {
    "vocab_size": 30,
    "cutoffs": [6, 14],
    "d_model": 16,
    "d_embed": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 28,
    "n_layer": 2,
    "mem_len": 6,
}
# With heads for tasks.
BERT_TASK = {**BERT, "hidden_size": 12, "intermediate_size": 20}
ROBERTA_TASK = {**BERT_TASK, "type_vocab_size": 1}
DISTILBERT_TASK = {**DISTILBERT, "dim": 12, "n_layers": 2, "hidden_dim": 20}
GPT_TASK = {**GPT, "n_embd": 12, "n_layer": 2, "pad_token_id": 0}
XLNET_TASK = {**XLNET, "d_model": 12, "d_inner": 20, "mem_len": None}
WORDS, SUMS = "embeddings.word_embeddings.weight", "word_emb.emb_layers.0.weight"
SEGMENTS = "roberta.embeddings.token_type_embeddings.weight"
XLNET_WORDS = "transformer.word_embedding.weight"
PERMUTED: dict[str, Any] = {"rows": 2, "windows": 2, "segments": 3, "targets": 4}
STREAM: dict[str, Any] = {"length": 7, "rows": 2, "windows": 2, "padding": "nowhere"}

CASES = {
    "bert_pretraining": Case("BertForPreTraining", BERT, f"bert.{WORDS}", encoder, segments=2, files="shards"),
    "bert_classification": Case(
        "BertForSequenceClassification",
        {**BERT_WIDE, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_labels": 3},
        f"bert.{WORDS}",
        encoder,
        length=11,
        segments=2,
    ),
    "roberta_lm": Case(
        "RobertaForMaskedLM",
        {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        f"roberta.{WORDS}",
        encoder,
        pad=1,
        files="bin",
    ),
    "roberta_classification": Case(
        "RobertaForSequenceClassification",
        {**BERT_WIDE, "type_vocab_size": 1, "pad_token_id": 0, "num_labels": 4},
        f"roberta.{WORDS}",
        encoder,
        length=9,
        changes={SEGMENTS: 0.0},
    ),
    "distilbert_lm": Case("DistilBertForMaskedLM", DISTILBERT, f"distilbert.{WORDS}", encoder),
    "distilbert_classification": Case(
        "DistilBertForSequenceClassification",
        {**DISTILBERT, "dim": 32, "n_heads": 4, "n_layers": 2, "activation": "relu"},
        f"distilbert.{WORDS}",
        encoder,
        length=17,
    ),
    "gpt_lm": Case("OpenAIGPTLMHeadModel", GPT, "transformer.tokens_embed.weight", decoder),
    "gpt_relu": Case(
        "OpenAIGPTLMHeadModel",
        {**GPT, "n_embd": 30, "n_head": 5, "n_layer": 2, "afn": "relu", "layer_norm_epsilon": 1e-3},
        "transformer.tokens_embed.weight",
        decoder,
        length=11,
        files="old",
    ),
    "gpt2_lm": Case("GPT2LMHeadModel", {**GPT, "n_inner": 50}, "transformer.wte.weight", decoder, files="shards"),
    "gpt2_erf": Case(
        "GPT2LMHeadModel",
        {**GPT, "n_embd": 30, "n_head": 5, "n_layer": 2, "activation_function": "gelu"},
        "transformer.wte.weight",
        decoder,
        length=15,
        files="bin",
    ),
    "xlnet_lm": Case(
        "XLNetLMHeadModel",
        {**XLNET, "mem_len": 9, "reuse_len": 6},
        XLNET_WORDS,
        xlnet,
        padding="left",
        **PERMUTED,
    ),
    "xlnet_both_directions": Case(
        "XLNetLMHeadModel",
        {
            **XLNET,
            "d_model": 32,
            "n_head": 2,
            "ff_activation": "gelu_new",
            "mem_len": 16,
            "bi_data": True,
            "clamp_len": 8,
        },
        XLNET_WORDS,
        xlnet,
        reversed=True,
        padding="left",
        **PERMUTED,
    ),
    "xlnet_causal_classification": Case(
        "XLNetForSequenceClassification",
        {**XLNET, "attn_type": "uni", "mem_len": None, "ff_activation": "relu", "num_labels": 3},
        XLNET_WORDS,
        xlnet,
        length=9,
        padding="nowhere",
        segments=3,
    ),
    "bert_tokens": Case(
        "BertForTokenClassification",
        {**BERT_TASK, "id2label": {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}},
        f"bert.{WORDS}",
        encoder,
        segments=2,
    ),
    "bert_answers": Case("BertForQuestionAnswering", BERT_TASK, f"bert.{WORDS}", encoder, length=11, segments=2),
    "roberta_tokens": Case(
        "RobertaForTokenClassification", {**ROBERTA_TASK, "num_labels": 3}, f"roberta.{WORDS}", encoder, pad=1, length=9
    ),
    "roberta_answers": Case("RobertaForQuestionAnswering", ROBERTA_TASK, f"roberta.{WORDS}", encoder, pad=1),
    "distilbert_tokens": Case(
        "DistilBertForTokenClassification", {**DISTILBERT_TASK, "num_labels": 4}, f"distilbert.{WORDS}", encoder
    ),
    "distilbert_answers": Case(
        "DistilBertForQuestionAnswering", DISTILBERT_TASK, f"distilbert.{WORDS}", encoder, length=11
    ),
    "gpt_classification": Case(
        "OpenAIGPTForSequenceClassification",
        {**GPT_TASK, "num_labels": 3},
        "transformer.tokens_embed.weight",
        decoder,
    ),
    "gpt2_classification": Case(
        "GPT2ForSequenceClassification", {**GPT_TASK, "num_labels": 4}, "transformer.wte.weight", decoder, length=11
    ),
    "gpt2_tokens": Case(
        "GPT2ForTokenClassification", {**GPT_TASK, "num_labels": 3}, "transformer.wte.weight", decoder, length=9
    ),
    "gpt2_answers": Case("GPT2ForQuestionAnswering", GPT_TASK, "transformer.wte.weight", decoder),
    "xlnet_tokens": Case(
        "XLNetForTokenClassification",
        {**XLNET_TASK, "num_labels": 5},
        XLNET_WORDS,
        xlnet,
        length=9,
        padding="left",
        segments=3,
    ),
    "xlnet_answers": Case(
        "XLNetForQuestionAnsweringSimple", XLNET_TASK, XLNET_WORDS, xlnet, padding="left", segments=3
    ),
    "transformer_xl_divided": Case(
        "TransfoXLLMHeadModel",
        {**TRANSFORMER_XL, "div_val": 2, "clamp_len": 5, "same_length": True, "untie_r": True},
        f"transformer.{SUMS}",
        transformer_xl,
        **STREAM,
    ),
    "transformer_xl_shared": Case(
        "TransfoXLLMHeadModel",
        {**TRANSFORMER_XL, "d_embed": 12, "div_val": 1, "clamp_len": -1, "same_length": False, "untie_r": False}
        | {"pre_lnorm": True, "mem_len": 4},
        f"transformer.{SUMS}",
        transformer_xl,
        **STREAM,
        files="bin",
    ),
    "transformer_xl_original": Case(
        "MemTransformerLM",
        {**TRANSFORMER_XL, "div_val": 2, "clamp_len": 4, "same_length": True},
        SUMS,
        original,
        **STREAM,
        files="bin",
    ),
    "transformer_xl_original_plain": Case(
        "MemTransformerLM",
        {**TRANSFORMER_XL, "cutoffs": [], "d_model": 24, "d_embed": 24, "n_head": 3, "div_val": 1, "mem_len": 5}
        | {"clamp_len": -1, "same_length": False},
        SUMS,
        original,
        **STREAM,
        files="old",
    ),
}
