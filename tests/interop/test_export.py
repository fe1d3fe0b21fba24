from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.contract import Vocabulary
from ctx_jax.interop import KINDS, export_folder, import_folder, kinds_of
from ctx_jax.interop.layout import parameter_shapes
from ctx_jax.interop.tensors import read_tensors
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig

SIZES: dict[str, Any] = {"vocabulary_size": 21, "width": 8, "layers": 2, "heads": 2, "feed_forward": 12}
RATES: dict[str, Any] = {"dropout": 0.25, "attention_dropout": 0.125}
BERT = BertConfig(**SIZES, **RATES, max_length=9, activation="relu", epsilon=1e-6, segments=3)
PLAIN = replace(BERT, segments=0, pooler=False, classes=None, activation="gelu")
ROBERTA = replace(PLAIN, position_offset=2)
DISTILBERT = replace(PLAIN, epsilon=1e-12, activation="gelu_tanh")
GPT = GptConfig(**{**SIZES, "feed_forward": 32}, **RATES, max_length=9, epsilon=1e-4)
FIRST = replace(GPT, norm="post", residual_scaling=False, position_std=0.02)
XLNET = XLNetConfig(**SIZES, dropout=0.25, attention_dropout=0.25, memory_length=7, clamp_length=5)
EXPORTS = [
    (BERT, "BertForPreTraining"),
    (replace(BERT, pooler=False, classes=None), "BertForMaskedLM"),
    (ROBERTA, "RobertaForMaskedLM"),
    (replace(ROBERTA, segments=1), "RobertaForMaskedLM"),
    (DISTILBERT, "DistilBertForMaskedLM"),
    (replace(GPT, feed_forward=12), "GPT2LMHeadModel"),
    (replace(GPT, activation="gelu"), "GPT2Model"),
    (FIRST, "OpenAIGPTLMHeadModel"),
    (replace(FIRST, activation="relu"), "OpenAIGPTModel"),
    (XLNET, "XLNetLMHeadModel"),
    (replace(XLNET, causal=True, memory_length=0, reuse_length=None, clamp_length=None), "XLNetLMHeadModel"),
]
VOCABULARY = Vocabulary(size=21, pad=1, unknown=2, begin=3, end=4, classification=5, separator=6, mask=7)


def drawn(config: Any) -> dict[str, Any]:
    """Random parameters; the padding of tables is 0, as it comes back."""
    rng = np.random.default_rng(0)
    flat = {path: rng.normal(size=shape).astype(np.float32) for path, shape in parameter_shapes(config).items()}
    for path in flat:
        if path in ("tokens/embedding", "head/bias", "head_bias"):
            flat[path][config.vocabulary_size :] = 0
    return unflatten_dict(flat, sep="/")


def equal(left: Any, right: Any) -> None:
    left, right = flatten_dict(left, sep="/"), flatten_dict(right, sep="/")
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert value.dtype == right[path].dtype and value.tobytes() == right[path].tobytes(), path


@pytest.mark.parametrize(("config", "kind"), EXPORTS)
def test_what_is_exported_comes_back_to_the_last_bit(config: Any, kind: str, tmp_path: Path):
    params = drawn(config)
    assert export_folder(config, params, tmp_path / "x", kind) == ()
    imported = import_folder(tmp_path / "x")
    assert imported[0] == config and imported.kind == kind and imported.absent == imported.left_out == ()
    equal(imported.params, params)
    assert kind in kinds_of(config)


@pytest.mark.parametrize(
    ("config", "kind", "absent"),
    [
        (replace(BERT, classes=5), "BertForSequenceClassification", "head/bias"),
        (replace(ROBERTA, pooler=True, classes=5), "RobertaForSequenceClassification", "head/bias"),
        (
            replace(DISTILBERT, pooler=True, pooler_activation="relu", classes=5),
            "DistilBertForSequenceClassification",
            "head/bias",
        ),
        (replace(XLNET, pooler=True, classes=5), "XLNetForSequenceClassification", "head_bias"),
        (replace(BERT, pooler=False, classes=None, token_classes=5), "BertForTokenClassification", "head/bias"),
        (replace(BERT, pooler=False, classes=None, token_classes=2), "BertForQuestionAnswering", "head/bias"),
        (replace(ROBERTA, token_classes=5), "RobertaForTokenClassification", "head/bias"),
        (replace(ROBERTA, token_classes=2), "RobertaForQuestionAnswering", "head/bias"),
        (replace(DISTILBERT, token_classes=5), "DistilBertForTokenClassification", "head/bias"),
        (replace(DISTILBERT, token_classes=2), "DistilBertForQuestionAnswering", "head/bias"),
        (replace(XLNET, token_classes=5), "XLNetForTokenClassification", "head_bias"),
        (replace(XLNET, token_classes=2), "XLNetForQuestionAnsweringSimple", "head_bias"),
        (replace(GPT, classes=5), "GPT2ForSequenceClassification", None),
        (replace(GPT, token_classes=5), "GPT2ForTokenClassification", None),
        (replace(GPT, token_classes=2), "GPT2ForQuestionAnswering", None),
        (replace(FIRST, classes=5), "OpenAIGPTForSequenceClassification", None),
    ],
)
def test_task_heads_come_back_without_the_lm_head(config: Any, kind: str, absent: str | None, tmp_path: Path):
    """GPT's LM head is its token table."""
    params = drawn(config)
    left_out = export_folder(config, params, tmp_path / "x", kind)
    imported = import_folder(tmp_path / "x")
    assert imported.config == config and imported.kind == kind and kind in kinds_of(config)
    assert (absent in left_out if absent else not left_out) and set(left_out) == set(imported.absent)
    kept = {path: x for path, x in flatten_dict(params, sep="/").items() if path not in left_out}
    equal(imported.params, unflatten_dict(kept, sep="/"))


@pytest.mark.parametrize(
    ("kind", "left", "classes", "token_classes"),
    [
        ("GPT2ForSequenceClassification", {"token_classifier/kernel", "token_classifier/bias"}, 3, None),
        ("GPT2ForTokenClassification", {"classifier/kernel"}, None, 2),
        ("GPT2ForQuestionAnswering", {"classifier/kernel"}, None, 2),
        ("GPT2LMHeadModel", {"classifier/kernel", "token_classifier/kernel", "token_classifier/bias"}, None, None),
    ],
)
def test_of_several_heads_the_one_that_is_asked_for_is_written(
    kind: str, left: set[str], classes: int | None, token_classes: int | None, tmp_path: Path
):
    config = replace(GPT, classes=3, token_classes=2)
    assert set(export_folder(config, drawn(config), tmp_path / "x", kind)) == left
    imported = import_folder(tmp_path / "x")
    assert imported.config == replace(GPT, classes=classes, token_classes=token_classes) and imported.kind == kind


def test_labels_are_written_where_the_head_has_some(tmp_path: Path):
    config = replace(BERT, classes=2, token_classes=2)
    params, names = drawn(config), ["O", "B-PER"]
    for kind, given, expected in (
        ("BertForTokenClassification", names, ("O", "B-PER")),
        ("BertForSequenceClassification", names, ("O", "B-PER")),
        ("BertForSequenceClassification", None, ("LABEL_0", "LABEL_1")),
        ("BertForQuestionAnswering", names, None),
        ("BertForPreTraining", names, None),
    ):
        folder = tmp_path / f"{kind} {given}"
        export_folder(config, params, folder, kind, labels=given)
        fields = json.loads((folder / "config.json").read_text())
        assert import_folder(folder).labels == expected
        if expected:
            assert fields["id2label"] == dict(zip("01", expected, strict=True))
            assert fields["label2id"] == {expected[0]: 0, expected[1]: 1}
        else:
            assert "id2label" not in fields and "label2id" not in fields
    for wrong in (["O"], ["O", "I", "B"]):
        with pytest.raises(ValueError, match=f"^{len(wrong)} labels cannot be exported: the head has 2, name each"):
            export_folder(config, params, tmp_path / "x", "BertForTokenClassification", labels=wrong)
    assert not (tmp_path / "x").exists()


def test_shards_come_back_as_one(tmp_path: Path):
    params = drawn(GPT)
    export_folder(GPT, params, tmp_path / "x", "GPT2LMHeadModel", shard_bytes=1000)
    assert len(list((tmp_path / "x").glob("*.safetensors"))) > 2
    equal(import_folder(tmp_path / "x").params, params)


def test_names_and_shapes_are_theirs(tmp_path: Path):
    """GPT's Conv1D is [inputs, outputs] with query, key and value side by side; a bare model has no prefix."""
    params = drawn(GPT)
    export_folder(GPT, params, tmp_path / "x", "GPT2LMHeadModel")
    found = read_tensors(tmp_path / "x")
    assert "lm_head.weight" not in found and found["transformer.wte.weight"].shape == (21, 8)
    attention = params["stack"]["layers"]["blocks_0"]["attention"]
    fused = found["transformer.h.1.attn.c_attn.weight"].read()
    np.testing.assert_array_equal(fused[:, 8:16], attention["key"]["kernel"][1].reshape(8, 8))
    np.testing.assert_array_equal(
        found["transformer.h.0.attn.c_attn.bias"].read()[16:], attention["value"]["bias"][0].reshape(8)
    )
    export_folder(GPT, params, tmp_path / "y", "GPT2Model")
    assert read_tensors(tmp_path / "y").keys() == {name.removeprefix("transformer.") for name in found}


def test_special_tokens_are_told(tmp_path: Path):
    export_folder(GPT, drawn(GPT), tmp_path / "x", "GPT2LMHeadModel", vocabulary=VOCABULARY)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (1, 3, 4)
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["model_type"] == "gpt2"
    export_folder(ROBERTA, drawn(ROBERTA), tmp_path / "y", "RobertaForMaskedLM", vocabulary=VOCABULARY)
    assert json.loads((tmp_path / "y" / "config.json").read_text())["pad_token_id"] == 1
    with pytest.raises(ValueError, match="padding id 0 does not fit position_offset 2"):
        other = replace(VOCABULARY, pad=0)
        export_folder(ROBERTA, drawn(ROBERTA), tmp_path / "z", "RobertaForMaskedLM", vocabulary=other)


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        (BERT, "T5Model", "kind 'T5Model' is not known: choose one of BertForPreTraining"),
        (BERT, "GPT2Model", "kind 'GPT2Model' is made of a GptConfig, not of a BertConfig"),
        (TransformerXLConfig(), "TransfoXLLMHeadModel", "kind 'TransfoXLLMHeadModel' can be read, but not written"),
        (ROBERTA, "BertForMaskedLM", "position_offset 2 cannot be exported: BERT has 0"),
        (PLAIN, "BertForMaskedLM", "segments 0 cannot be exported: BERT has 1 or more"),
        (PLAIN, "RobertaForMaskedLM", "position_offset 0 cannot be exported"),
        (replace(ROBERTA, activation="relu"), "RobertaForMaskedLM", "the LM head of RoBERTa has 'gelu'"),
        (PLAIN, "DistilBertForMaskedLM", "epsilon 1e-06 cannot be exported: DistilBERT has 1e-12"),
        (replace(BERT, classes=3), "BertForPreTraining", "classes 3 cannot be exported"),
        (replace(BERT, classes=None), "BertForSequenceClassification", "classes None cannot be exported"),
        (BERT, "BertForTokenClassification", "token_classes None cannot be exported: a model for token classification"),
        (BERT, "BertForQuestionAnswering", "token_classes None cannot be exported: a model for question answering has"),
        (replace(XLNET, token_classes=3), "XLNetForQuestionAnsweringSimple", "token_classes 3 cannot be exported"),
        (GPT, "GPT2ForSequenceClassification", "classes None cannot be exported: a model for sequence classification"),
        (DISTILBERT, "DistilBertForSequenceClassification", "pooler False cannot be exported: DistilBERT has True"),
        (FIRST, "GPT2LMHeadModel", "norm 'post' cannot be exported: GPT-2 has 'pre'"),
        (replace(FIRST, feed_forward=12), "OpenAIGPTModel", "feed_forward 12 cannot be exported: GPT has 32"),
        (
            replace(FIRST, activation="gelu"),
            "OpenAIGPTModel",
            "activation 'gelu' cannot be exported: GPT has gelu_tanh",
        ),
        (replace(GPT, attention_pattern=("dense", "local")), "GPT2Model", "GPT-2 has dense layers alone"),
        (replace(XLNET, attention_dropout=0.0), "XLNetModel", "attention_dropout 0.0 cannot be exported: XLNet"),
    ],
)
def test_what_theirs_cannot_hold_is_named(config: Any, kind: str, told: str, tmp_path: Path):
    with pytest.raises(ValueError) as error:
        export_folder(config, {}, tmp_path / "x", kind)
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_lacking_parameters_are_named(tmp_path: Path):
    params = drawn(BERT)
    del params["head"]
    with pytest.raises(ValueError, match="needs parameters that this model lacks: head/dense/kernel, head/dense/bias"):
        export_folder(BERT, params, tmp_path / "x", "BertForPreTraining")


def test_nothing_is_overwritten_or_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    params = drawn(GPT)
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="is there already: choose another folder"):
        export_folder(GPT, params, tmp_path / "x", "GPT2Model")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("ctx_jax.interop.write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        export_folder(GPT, params, tmp_path / "y", "GPT2Model")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_kinds_of_a_model_come_with_the_fullest_first():
    assert kinds_of(BERT)[0] == "BertForPreTraining"
    assert kinds_of(ROBERTA) == ("RobertaForMaskedLM",)
    assert kinds_of(DISTILBERT) == ("DistilBertForMaskedLM", "DistilBertModel")
    assert kinds_of(replace(FIRST, classes=3))[0] == "OpenAIGPTForSequenceClassification"
    tagger = kinds_of(replace(ROBERTA, token_classes=3))
    assert tagger == ("RobertaForTokenClassification", "RobertaForMaskedLM")
    assert kinds_of(TransformerXLConfig()) == ()
    assert all(family.bare in KINDS for family in KINDS.values())


def test_files_are_readable_like_any_other(tmp_path: Path):
    export_folder(DISTILBERT, drawn(DISTILBERT), tmp_path / "theirs", "DistilBertModel")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "theirs").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
