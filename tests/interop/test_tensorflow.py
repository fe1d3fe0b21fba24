"""Checkpoints that the original code of BERT and XLNet wrote, read by us: the same numbers on its own batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.interop import export_folder, import_folder
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.masked import Masked
from ctx_jax.training.optimizers import BertAdam, decays
from ctx_jax.training.schedules import WarmUp
from tests.golden.pretraining import HERE, bert_prepared, load_record, xlnet_prepared

ROWS = 4


def close(ours: Any, theirs: Any) -> None:
    """fp32: each value within 1e-4, within 1e-5 in the mean."""
    error = np.abs(np.asarray(ours) - theirs)
    assert ours.shape == theirs.shape and np.abs(theirs).max() > 0.1
    assert error.max() < 1e-4 and error.mean() < 1e-5


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any, Any, Any]:
    """Config (of the code's head, whose GELU is by tanh), parameters, batch and record."""
    imported = import_folder(HERE / "bert")
    batch = {name: x[:ROWS] for name, x in bert_prepared(load_record("bert_pretraining")).items()}
    record = load_record("bert/outputs")
    return replace(imported.config, activation="gelu_tanh"), imported.params, batch, record


def test_configurations_are_carried_over():
    """Their "gelu" is by erf in BERT's published weights and by tanh in XLNet's; what a file lacks is our default."""
    imported = import_folder(HERE / "bert")
    assert imported.config == BertConfig(
        vocabulary_size=33, width=24, layers=2, heads=3, feed_forward=40, max_length=32, attention_dropout=0.2
    )
    assert (imported.kind, imported.absent, imported.left_out) == ("BertForPreTraining", (), ())
    imported = import_folder(HERE / "xlnet")
    assert imported.config == XLNetConfig(vocabulary_size=43, width=24, layers=2, heads=3, feed_forward=40)
    assert (imported.kind, imported.absent, imported.left_out) == ("XLNetLMHeadModel", (), ())


def test_bert_gives_the_same(bert: tuple[Any, Any, Any, Any]):
    config, params, batch, record = bert
    model = config.build()

    @jax.jit
    def run(params: Any) -> Any:
        output = model.apply({"params": params}, batch, collect=("layers",))
        hidden = jnp.take_along_axis(output.hidden, batch["target_positions"][..., None], axis=1)
        lm, relation = (
            model.apply({"params": params}, x, method=m) for x, m in ((hidden, "logits"), (output.pooled, "classify"))
        )
        return output, jax.nn.log_softmax(lm), jax.nn.log_softmax(relation)

    output, lm, relation = run(params)
    real = batch["documents"] > 0
    close(jnp.moveaxis(output.layers, 1, 2)[real], np.moveaxis(record["layers"], 1, 2)[real])
    close(output.pooled, record["pooled"])
    close(lm, record["lm"])
    close(relation, record["relation"])


def test_bert_trains_the_same(bert: tuple[Any, Any, Any, Any]):
    """Loss, gradient, clipping, warm-up, decay of all but LayerNorm and biases, Adam without bias correction."""
    config, params, batch, record = bert
    model, objective = config.build(), Masked(max_predictions=5, relation=1.0)
    optimizer = BertAdam(WarmUp(rate=1e-3, warmup=3, from_start=True)).build(10)
    counts = objective.weights(batch)

    @jax.jit
    def loss(params: Any) -> jax.Array:
        totals = objective.loss(model, {"params": params}, batch, None, None).totals
        return totals["lm"] / counts["lm"] + totals["relation"] / counts["relation"]

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.tx.update(gradient, state, params)
        return value, gradient, jax.tree.map(jnp.add, params, updates), state

    state = optimizer.tx.init(params)
    losses, gradient = [], None
    for number in range(len(record["losses"])):
        value, gradients, params, state = step(params, state)
        losses.append(value)
        gradient = gradients if number == 0 else gradient
    assert gradient is not None and decays(params)["pooler"]["kernel"]
    close(gradient["tokens"]["embedding"][: config.vocabulary_size], record["gradient"])
    np.testing.assert_allclose(losses, record["losses"], rtol=2e-5)
    assert record["losses"][-1] < record["losses"][0] - 0.1


def test_answers_of_run_squad_are_the_same():
    """Its checkpoint has a pooler, too, that the answers do not read."""
    imported, record = import_folder(HERE / "answers"), load_record("answers/outputs")
    assert (imported.kind, imported.labels, imported.left_out) == ("BertForQuestionAnswering", None, ())
    assert (imported.config.token_classes, imported.config.classes, imported.config.pooler) == (2, None, True)
    assert imported.absent == ("head/bias", "head/dense/bias", "head/dense/kernel", "head/norm/bias", "head/norm/scale")
    config = replace(imported.config, activation="gelu_tanh")
    batch = {name: x[:ROWS] for name, x in bert_prepared(load_record("bert_pretraining")).items()}
    real = batch["documents"] > 0

    @jax.jit
    def run(params: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params}
            hidden = config.build().apply(variables, batch).hidden
            logits = config.build().apply(variables, hidden, method="classify_tokens")
            return (jnp.square(logits) * real[..., None]).sum(), logits

        return jax.grad(loss, has_aux=True)(params)

    gradient, logits = run(imported.params)
    close(logits[real], record["logits"][real])
    close(gradient["tokens"]["embedding"][: config.vocabulary_size], record["gradient"])


def test_xlnet_gives_the_same():
    """Two windows, the second with the memory of the first; permuted, in both directions, loss and gradient."""
    imported, record, batches = (
        import_folder(HERE / "xlnet"),
        load_record("xlnet/outputs"),
        load_record("xlnet_pretraining"),
    )
    config = replace(imported.config, memory_length=24, reuse_length=16)
    model, memory, gradient = config.build(), config.build().init_memory(ROWS), {}

    @jax.jit
    def run(params: Any, batch: Any, memory: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params}
            output = model.apply(variables, batch, memory, collect=("layers", "attention"))
            logits = model.apply(variables, output.query, method="logits")
            scores = model.apply(variables, output.query, batch["targets"], batch["target_weights"], method="score")
            return scores.total / batch["target_weights"].sum(), (output, logits)

        return jax.value_and_grad(loss, has_aux=True)(params)

    for number in range(2):
        batch = xlnet_prepared(batches, number)
        (loss, (output, logits)), gradient = run(imported.params, batch, memory)
        memory = output.memory
        close(output.layers, record[f"{number}/layers"])
        predicted = batch["target_weights"] > 0
        close(logits[predicted], record[f"{number}/logits"][predicted])
        np.testing.assert_allclose(loss, record[f"{number}/loss"], rtol=1e-5)
        seen, blocked = output.attention.min((1, 2)) > 0, record[f"{number}/content_blocked"]
        known = blocked.shape[-1]  # they start without a memory, we with an empty one
        np.testing.assert_array_equal(seen[..., -known:], ~blocked)
        assert not seen[..., :-known].any()
    close(gradient["tokens"]["embedding"][: config.vocabulary_size], record["gradient"])


@pytest.mark.parametrize("name", ["bert", "xlnet"])
def test_they_leave_as_hugging_face_has_them(name: str, tmp_path: Path):
    imported = import_folder(HERE / name)
    assert export_folder(imported.config, imported.params, tmp_path / name, imported.kind) == ()
    again = import_folder(tmp_path / name)
    assert again.config == imported.config and again.kind == imported.kind
    jax.tree.map(np.testing.assert_array_equal, again.params, imported.params)


def message(folder: Path, **options: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        import_folder(folder, **options)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def changed(folder: Path, name: str, **fields: Any) -> Path:
    shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
    path = folder / f"{name}_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("bert", {"num_hidden_layers": 3}, "missing bert/encoder/layer_2/attention/self/query/kernel"),
        ("bert", {"num_hidden_layers": 1}, "not those of its bert_config.json: unused bert/encoder/layer_1/"),
        ("bert", {"vocab_size": 30}, "word_embeddings has shape (33, 24) but bert_config.json makes it (30, 24)"),
        ("bert", {"hidden_act": "tanh"}, "bert_config.json: hidden_act 'tanh' cannot be honoured"),
        ("bert", {"num_attention_heads": 5}, "bert_config.json: heads 5 does not divide width 24"),
        ("xlnet", {"untie_r": False}, "xlnet_config.json: untie_r False cannot be honoured"),
        ("xlnet", {"d_head": 4}, "xlnet_config.json: d_head 4 cannot be honoured"),
        ("xlnet", {"n_head": 4, "d_head": 6}, "r_w_bias has shape (2, 3, 8) but xlnet_config.json makes it (2, 4, 6)"),
        (
            "xlnet",
            {"ff_activation": "gelu_new"},
            "ff_activation 'gelu_new' cannot be honoured: this model has gelu, relu",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, fields: dict[str, Any], told: str, tmp_path: Path):
    assert told in message(changed(tmp_path, name, **fields))


def test_modules_are_left_out_by_name(tmp_path: Path):
    folder = changed(tmp_path, "bert")
    imported = import_folder(folder, leave_out=["cls/seq_relationship"])
    names = {f"cls/seq_relationship/output_{kind}" for kind in ("weights", "bias")}
    slots = {f"{name}/adam_{moment}" for name in names for moment in "mv"}
    assert set(imported.left_out) == names | slots
    assert imported.kind == "BertForMaskedLM" and imported.config.classes is None
    assert "--leave-out 'cls/seq' names no tensor" in message(folder, leave_out=["cls/seq"])
