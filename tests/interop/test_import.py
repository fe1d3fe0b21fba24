from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from ctx_jax.interop import import_folder
from ctx_jax.interop.tensors import read_tensors
from tests.golden.compare import HERE

Changed = Callable[..., Path]
LM, CLASSES = "distilbert_lm", "bert_classification"


def message(folder: Path, **options: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        import_folder(folder, **options)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(held: dict[str, Any]) -> None:
        for name in list(held):
            held[name.replace(old, new)] = held.pop(name)

    return change


def same(left: Any, right: Any) -> None:
    left, right = flatten_dict(left), flatten_dict(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        np.testing.assert_array_equal(value, right[path])


def test_every_missing_and_every_unused_tensor_is_named(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        del held["vocab_transform.bias"], held["distilbert.transformer.layer.1.ffn.lin2.weight"]
        held["other.weight"] = held["other.bias"] = np.zeros(2, np.float32)

    told = message(changed(LM, tensors=change))
    assert "missing distilbert.transformer.layer.1.ffn.lin2.weight, vocab_transform.bias; " in told
    assert "unused other.bias, other.weight; what this model has no place for" in told


def test_what_has_no_place_is_left_out_by_name_only(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        held["other.weight"] = held["other.bias"] = held["other2"] = np.zeros(2, np.float32)

    folder = changed(LM, tensors=change)
    assert "unused other2;" in message(folder, leave_out=["other"])
    imported = import_folder(folder, leave_out=["other", "other2"])
    assert set(imported.left_out) == {"other.weight", "other.bias", "other2"}
    same(imported.params, import_folder(HERE / LM).params)
    assert "--leave-out 'othe' names no tensor" in message(folder, leave_out=["othe"])


def test_shapes_that_differ_are_both_named(changed: Changed):
    folder = changed(LM, config={"hidden_dim": 38})
    assert (
        "distilbert.transformer.layer.0.ffn.lin1.weight has shape (36, 20) but config.json makes it (38, 20)"
        in message(folder)
    )
    told = message(changed(CLASSES, config={"id2label": {"0": "a", "1": "b"}}))
    assert "classifier.weight has shape (3, 32) but config.json makes it (2, 32)" in told


def test_more_layers_than_config_json_has_are_unused(changed: Changed):
    assert "unused distilbert.transformer.layer.2." in message(changed(LM, config={"n_layers": 2}))
    folder = changed(CLASSES, config={"num_hidden_layers": 4})
    assert "missing bert.encoder.layer.3.attention.self.query.weight" in message(folder)


def test_tied_tensors_may_be_there_under_either_name_or_both_but_equal(changed: Changed):
    original = import_folder(HERE / LM)
    table, decoder = "distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"
    folder = changed(LM)

    def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Path:
        shutil.rmtree(folder)
        return changed(LM, tensors=change)

    same(import_folder(with_tensors(lambda held: held.update({decoder: held[table].copy()}))).params, original.params)
    same(import_folder(with_tensors(lambda held: held.update({decoder: held.pop(table)}))).params, original.params)
    told = message(with_tensors(lambda held: held.update({decoder: held[table] + 1})))
    assert f"{decoder} differs from {table}, and this model has one tensor for both" in told


def test_a_body_without_prefix_and_buffers_and_old_names_are_read(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        rename("LayerNorm.weight", "LayerNorm.gamma")(held)
        rename("LayerNorm.bias", "LayerNorm.beta")(held)
        held["bert.embeddings.position_ids"] = np.arange(19)[None]

    same(import_folder(changed(CLASSES, tensors=change)).params, import_folder(HERE / CLASSES).params)
    folder = changed(LM, tensors=rename("distilbert.", ""))
    same(import_folder(folder).params, import_folder(HERE / LM).params)
    gpt = changed(
        "gpt_lm",
        tensors=lambda held: held.update({"transformer.h.0.attn.bias": np.ones((1, 1, 15, 15), np.float32)}),
    )
    same(import_folder(gpt).params, import_folder(HERE / "gpt_lm").params)


def test_heads_are_those_of_the_tensors_and_absent_ones_are_named(changed: Changed):
    def only_body(held: dict[str, Any]) -> None:
        for name in [name for name in held if not name.startswith("bert.")]:
            del held[name]

    imported = import_folder(changed(CLASSES, tensors=only_body))
    assert imported.kind == "BertModel" and imported.config.pooler and imported.config.classes is None
    assert set(imported.absent) == {
        "head/bias",
        "head/dense/bias",
        "head/dense/kernel",
        "head/norm/bias",
        "head/norm/scale",
    }
    assert import_folder(HERE / "bert_pretraining").absent == ()
    assert import_folder(HERE / "xlnet_causal_classification").absent == ("head_bias",)


POOLER = {"bert.pooler.dense.weight": np.ones((12, 12), np.float32), "bert.pooler.dense.bias": np.ones(12, np.float32)}


@pytest.mark.parametrize(
    ("named", "kind", "classes", "token_classes"),
    [
        ("BertForTokenClassification", "BertForTokenClassification", None, 5),
        ("BertForSequenceClassification", "BertForSequenceClassification", 5, None),
        (None, "BertForSequenceClassification", 5, None),
        ("BertModel", "BertForSequenceClassification", 5, None),
    ],
)
def test_where_a_pooler_leaves_the_head_open_the_class_decides(
    named: str | None, kind: str, classes: int | None, token_classes: int | None, changed: Changed
):
    """Folders of token classification have a pooler, too, if they are old."""
    folder = changed("bert_tokens", {"architectures": named and [named]}, lambda held: held.update(POOLER))
    imported = import_folder(folder)
    assert (imported.kind, imported.config.classes, imported.config.token_classes) == (kind, classes, token_classes)
    assert imported.config.pooler and imported.params["pooler"]["bias"].tolist() == [1] * 12
    theirs = read_tensors(HERE / "bert_tokens")["classifier.weight"].read()
    ours = imported.params["classifier" if classes else "token_classifier"]["kernel"]
    np.testing.assert_array_equal(ours, theirs.T)


def test_a_classifier_without_its_pooler_is_one_of_every_token_unless_it_is_named_otherwise(changed: Changed):
    imported = import_folder(changed("bert_tokens", {"architectures": None}))
    assert imported.kind == "BertForTokenClassification" and not imported.config.pooler
    assert imported.labels == ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

    def without_pooler(held: dict[str, Any]) -> None:
        del held["bert.pooler.dense.weight"], held["bert.pooler.dense.bias"]

    told = message(changed(CLASSES, tensors=without_pooler))
    assert "missing bert.pooler.dense.weight, bert.pooler.dense.bias" in told and "unused" not in told
    told = message(
        changed("distilbert_tokens", {"architectures": ["DistilBertForSequenceClassification"]}, lambda held: None)
    )
    assert "missing pre_classifier.weight, pre_classifier.bias" in told


def test_an_old_folder_of_question_answering_keeps_its_pooler(changed: Changed):
    imported = import_folder(changed("bert_answers", tensors=lambda held: held.update(POOLER)))
    assert imported.kind == "BertForQuestionAnswering" and imported.labels is None
    assert imported.config.pooler and imported.config.token_classes == 2 and imported.config.classes is None


def test_two_heads_of_every_token_are_refused(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        held["classifier.weight"], held["classifier.bias"] = np.ones((2, 12), np.float32), np.ones(2, np.float32)

    told = "two heads of answer, token would be token_classifier/bias: leave one out by name"
    folder = changed("gpt2_answers", tensors=change)
    with pytest.raises(ValueError, match=told):
        import_folder(folder)
    assert import_folder(folder, ["classifier"]).kind == "GPT2ForQuestionAnswering"


def test_the_beam_search_of_xlnets_answers_is_no_head_of_ours(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        rename("qa_outputs", "start_logits.dense")(held)
        held["answer_class.dense_1.weight"] = np.zeros((1, 12), np.float32)

    folder = changed("xlnet_answers", {"architectures": ["XLNetForQuestionAnswering"]}, change)
    told = message(folder)
    assert "unused answer_class.dense_1.weight, start_logits.dense.bias, start_logits.dense.weight" in told
    imported = import_folder(folder, ["start_logits", "answer_class"])
    assert imported.kind == "XLNetModel" and imported.config.token_classes is None


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ({"0": "no", "2": "yes", "1": "perhaps"}, ("no", "perhaps", "yes")),
        (None, None),
        ({"0": "no", "1": "yes", "3": "perhaps"}, None),
        ({"0": "no", "1": "yes", "01": "perhaps"}, None),
        ({"0": "no", "1": "yes", "2": 3}, None),
        (["no", "yes", "perhaps"], None),
        (3, None),
    ],
)
def test_labels_are_named_by_all_ids(names: Any, labels: tuple[str, ...] | None, changed: Changed):
    folder = changed(CLASSES, config={"id2label": names, "num_labels": 3})
    if names is None or labels:
        assert import_folder(folder).labels == labels
    else:
        assert "config.json: id2label must give a name to each id from 0 on" in message(folder)


def test_tables_are_padded_with_zeros():
    imported = import_folder(HERE / LM)
    table = imported.params["tokens"]["embedding"]
    assert table.shape == (128, 20) and table.dtype == np.float32
    assert np.abs(table[:53]).min() > 0 and not table[53:].any()
    assert imported.params["head"]["bias"].shape == (128,)


def test_quantised_tensors_are_refused(changed: Changed):
    def change(held: dict[str, Any]) -> None:
        held["vocab_transform.weight"] = held["vocab_transform.weight"].astype(np.int8)

    assert "vocab_transform.weight is of type int8: quantised weights cannot be read" in message(
        changed(LM, tensors=change)
    )


def test_the_original_transformer_xl_has_its_tails_in_reverse():
    imported = import_folder(HERE / "transformer_xl_original")
    other = import_folder(HERE / "transformer_xl_divided")
    assert imported.kind == "MemTransformerLM" and other.kind == "TransfoXLLMHeadModel"
    for one, name, step in ((imported, "transformer_xl_original", -1), (other, "transformer_xl_divided", 1)):
        theirs = read_tensors(HERE / name)["crit.cluster_weight"].read()
        np.testing.assert_array_equal(one.params["vocabulary"]["tails"]["embedding"], theirs[::step])


FIELDS = [
    (
        CLASSES,
        {"position_embedding_type": "relative_key"},
        "position_embedding_type 'relative_key' cannot be honoured: this model has \"absolute\"",
    ),
    (
        CLASSES,
        {"hidden_act": "silu"},
        "hidden_act 'silu' cannot be honoured: this model has gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu",
    ),
    (CLASSES, {"is_decoder": True}, "is_decoder True cannot be honoured: this model has false"),
    (CLASSES, {"hidden_size": "32"}, "hidden_size '32' cannot be honoured: this model needs a whole number there"),
    (CLASSES, {"num_attention_heads": 5}, "heads 5 does not divide width 32"),
    (CLASSES, {"rope_theta": 10000.0}, "rope_theta 10000.0 is not known, and it may change what the model computes"),
    (
        CLASSES,
        {"model_type": "t5"},
        "model_type 't5' cannot be honoured: this model is one of bert, roberta, distilbert",
    ),
    (CLASSES, {"model_type": ...}, "lacks 'model_type'"),
    (LM, {"tie_word_embeddings": False}, "tie_word_embeddings False cannot be honoured: this model has true"),
    (LM, {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds True cannot be honoured"),
    (
        "roberta_lm",
        {"hidden_act": "relu"},
        "hidden_act 'relu' cannot be honoured: this model has the LM head's activation everywhere",
    ),
    (
        "gpt_lm",
        {"embd_pdrop": 0.2},
        "embd_pdrop 0.2 cannot be honoured: this model has one such rate or size, and resid_pdrop is 0.1",
    ),
    ("gpt_lm", {"afn": "silu"}, "afn 'silu' cannot be honoured: this model has gelu, relu"),
    ("gpt2_lm", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True cannot be honoured"),
    ("gpt2_lm", {"scale_attn_weights": False}, "scale_attn_weights False cannot be honoured"),
    ("gpt2_lm", {"add_cross_attention": True}, "add_cross_attention True cannot be honoured"),
    ("gpt2_lm", {"resid_pdrop": 1.5, "embd_pdrop": 1.5}, "dropout 1.5 is not a rate"),
    ("xlnet_lm", {"attn_type": "other"}, "attn_type 'other' cannot be honoured: this model has bi, uni"),
    ("xlnet_lm", {"untie_r": False}, "untie_r False cannot be honoured"),
    ("xlnet_lm", {"same_length": True}, "same_length True cannot be honoured"),
    ("xlnet_lm", {"n_head": 0}, "n_head 0 cannot be honoured: this model needs 1 or more there"),
    ("xlnet_lm", {"d_head": 9}, "d_head 9 cannot be honoured"),
    ("xlnet_causal_classification", {"summary_type": "mean"}, "summary_type 'mean' cannot be honoured"),
    ("transformer_xl_divided", {"attn_type": 2}, "attn_type 2 cannot be honoured"),
    ("transformer_xl_divided", {"sample_softmax": 10}, "sample_softmax 10 cannot be honoured"),
    ("transformer_xl_divided", {"d_head": 9}, "d_head 9 cannot be honoured: this model has d_model / n_head, 8"),
    ("transformer_xl_divided", {"tie_projs": [True, True, True]}, "tie_projs [True, True, True] cannot be honoured"),
    ("transformer_xl_divided", {"cutoffs": [14, 6]}, "cutoffs (14, 6) do not ascend"),
    ("transformer_xl_divided", {"cutoffs": "6"}, "cutoffs '6' cannot be honoured"),
]


@pytest.mark.parametrize(("name", "fields", "told"), FIELDS)
def test_a_field_that_cannot_be_honoured_is_named(name: str, fields: dict[str, Any], told: str, changed: Changed):
    assert told in message(changed(name, config=fields))


def test_fields_that_change_nothing_are_passed_over(changed: Changed):
    more = {"rope_scaling": None, "pruned_heads": {}, "gradient_checkpointing": True, "classifier_dropout": 0.3}
    more |= {"task_specific_params": {"a": 1}, "directionality": "bidi", "pooler_fc_size": 768}
    assert import_folder(changed(CLASSES, config=more)).config == import_folder(HERE / CLASSES).config


def test_a_folder_without_config_json_says_what_to_write(tmp_path: Path):
    assert "config.json is missing: it must name the model_type" in message(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in message(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert "is not a JSON object" in message(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float, changed: Changed):
    def change(held: dict[str, Any]) -> None:
        held["vocab_transform.bias"] = held["vocab_transform.bias"].copy()
        held["vocab_transform.bias"][3] = value

    assert "vocab_transform.bias holds values that are not finite" in message(changed(LM, tensors=change))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"architectures": 5}, "architectures 5 cannot be honoured: this model needs a list of names there"),
        ({"architectures": "BertModel"}, "architectures 'BertModel' cannot be honoured"),
        ({"n_layers": 10**9}, "has 1,000,000,000 layers, and there are"),
        (
            {"vocab_size": 10**12},
            "vocab_size 1000000000000 cannot be honoured",
        ),
    ],
)
def test_fields_beyond_reason_are_named(fields: dict[str, Any], told: str, changed: Changed):
    assert told in message(changed(LM, config=fields))
