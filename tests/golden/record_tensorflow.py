"""Records tiny checkpoints of google-research/bert and zihangdai/xlnet, and what that code computes of the batches that
`record_pretraining` has recorded. Needs tensorflow, six, and clones of both in one folder.

    python -m tests.golden.record_tensorflow --original FOLDER
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.originals import load, old
from tests.golden.record_pretraining import HERE, LENGTH, PREDICTED, REUSED, VOCABULARY

Arrays = dict[str, np.ndarray]
BERT_ROWS, STEPS = 4, 6
BERT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "max_position_embeddings": LENGTH,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}
ANSWERS = {**BERT, "hidden_size": 12, "intermediate_size": 20}
XLNET = {
    "n_token": 43,
    "d_model": 24,
    "n_layer": 2,
    "n_head": 3,
    "d_head": 8,
    "d_inner": 40,
    "ff_activation": "gelu",
    "untie_r": True,
}
XLNET_RUN = {
    "model_dir": "",
    "num_predict": PREDICTED,
    "use_tpu": False,
    "use_bfloat16": False,
    "dropout": 0.1,
    "dropatt": 0.1,
    "init": "normal",
    "init_range": 0.1,
    "init_std": 0.02,
    "clamp_len": -1,
    "mem_len": 24,
    "reuse_len": REUSED,
    "bi_data": True,
    "same_length": False,
}


def randomise(session: Any, seed: int) -> None:
    """Draws every parameter, gains around 1, so that nothing is 0 or 1 by chance."""
    rng = np.random.default_rng(seed)
    session.run(old.global_variables_initializer())
    for variable in old.trainable_variables():
        mean = 1.0 if variable.op.name.endswith("gamma") else 0.0
        variable.load(rng.normal(mean, 0.25, variable.shape.as_list()).astype(np.float32), session)


def bert(folder: Path) -> Arrays:
    """The parameters with step and some moments of Adam, layers, log-probabilities, the losses of a few steps."""
    modeling, pretraining, optimization = load(folder, "modeling", "run_pretraining", "optimization")
    with np.load(HERE / "bert_pretraining.npz") as file:
        batch = {name: file[name][:BERT_ROWS] for name in file if len(file[name]) == len(file["input_ids"])}
    with old.Graph().as_default(), old.Session() as session:
        config = modeling.BertConfig.from_dict(BERT)
        inputs = {name: old.constant(x.astype(np.int32)) for name, x in batch.items() if x.dtype.kind == "i"}
        model = modeling.BertModel(
            config, False, inputs["input_ids"], inputs["input_mask"], inputs["segment_ids"], False
        )
        lm_loss, _, lm = pretraining.get_masked_lm_output(
            config,
            model.get_sequence_output(),
            model.get_embedding_table(),
            inputs["masked_lm_positions"],
            inputs["masked_lm_ids"],
            old.constant(batch["masked_lm_weights"]),
        )
        relation_loss, _, relation = pretraining.get_next_sentence_output(
            config, model.get_pooled_output(), inputs["next_sentence_labels"]
        )
        loss = lm_loss + relation_loss
        old.train.get_or_create_global_step()
        (gradient,) = old.gradients(loss, [model.get_embedding_table()])
        step = old.placeholder(old.int64, [])
        step.assign = lambda value: old.no_op()  # the original counts on while others read the count
        optimization.tf.train = SimpleNamespace(
            get_or_create_global_step=lambda: step, polynomial_decay=old.train.polynomial_decay
        )
        train = optimization.create_optimizer(loss, 1e-3, 10, 3, False)
        randomise(session, 1)
        kept = [v for v in old.global_variables() if "adam" not in v.op.name or v.op.name.startswith("cls/")]
        save(session, kept, HERE / "bert", "bert_model.ckpt")
        layers = [model.embedding_output, *model.get_all_encoder_layers()]
        gradient = old.convert_to_tensor(gradient)
        wanted = {"lm": lm, "relation": relation, "pooled": model.get_pooled_output(), "gradient": gradient}
        found = session.run({**wanted, "layers": old.stack(layers, 1)})
        losses = []
        for number in range(STEPS):
            losses.append(session.run(loss))
            session.run(train, {step: number})
    found["lm"] = found["lm"].reshape(*batch["masked_lm_positions"].shape, -1)
    (HERE / "bert" / "bert_config.json").write_text(json.dumps(BERT, indent=2) + "\n")
    return {**found, "losses": np.array(losses)}


def answers(folder: Path) -> Arrays:
    """The parameters of the model of run_squad.py; its logits [B, T, 2], and the gradient of their squares' sum."""
    modeling, squad = load(folder, "modeling", "run_squad")
    with np.load(HERE / "bert_pretraining.npz") as file:
        ids, mask, segments = (file[name][:BERT_ROWS] for name in ("input_ids", "input_mask", "segment_ids"))
    with old.Graph().as_default(), old.Session() as session:
        inputs = (old.constant(x.astype(np.int32)) for x in (ids, mask, segments))
        logits = old.stack(squad.create_model(modeling.BertConfig.from_dict(ANSWERS), False, *inputs, False), -1)
        loss = old.reduce_sum(old.square(logits) * mask[..., None].astype(np.float32))
        (table,) = (v for v in old.trainable_variables() if v.op.name.endswith("word_embeddings"))
        gradient = old.convert_to_tensor(old.gradients(loss, [table])[0])
        randomise(session, 3)
        save(session, old.trainable_variables(), HERE / "answers", "model.ckpt-7")
        recorded = session.run({"logits": logits, "gradient": gradient})
    (HERE / "answers" / "bert_config.json").write_text(json.dumps(ANSWERS, indent=2) + "\n")
    return recorded


def xlnet(folder: Path) -> Arrays:
    """The parameters in two shards; of two batches in a row the layers, query stream and loss, and what decides who
    sees whom and how."""
    builder, modeling = load(folder, "function_builder", "modeling")
    builder.modeling, builder.xlnet.modeling = modeling, modeling
    seen: dict[str, list[Any]] = {"embedding": [], "streams": [], "query": [], "attention": []}

    def watch(name: str, note: Any) -> None:
        original = getattr(modeling, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            output = original(*arguments, **named)
            note(output, arguments, named)
            return output

        setattr(modeling, name, watched)

    watch("embedding_lookup", lambda output, *_: seen["embedding"].append(output[0]))
    watch("positionwise_ffn", lambda output, *_: seen["streams"].append(output))
    watch("lm_loss", lambda output, _, named: seen["query"].append(named["hidden"]))
    watch("two_stream_rel_attn", lambda output, _, named: seen["attention"].append(named))
    with np.load(HERE / "xlnet_pretraining.npz") as file:
        batches = [{name: x[number] for name, x in file.items()} for number in range(2)]
    found: dict[str, Any] = {}
    with old.Graph().as_default(), old.Session() as session, tempfile.TemporaryDirectory() as scratch:
        flags = SimpleNamespace(**XLNET, **{**XLNET_RUN, "model_dir": scratch})
        memory: dict[str, Any] = {}
        for number, batch in enumerate(batches):
            for calls in seen.values():
                calls.clear()
            features = {name: old.constant(x) for name, x in batch.items()}
            loss, memory, _ = builder.two_stream_loss(flags, features, None, memory, False)
            (table,) = (v for v in old.trainable_variables() if v.op.name.endswith("lookup_table"))
            (bias,) = (v for v in old.trainable_variables() if v.op.name.endswith("lm_loss/bias"))
            layers = old.stack([seen["embedding"][0], *seen["streams"][1::2]])  # the query stream comes first
            attention = seen["attention"][0]
            values = {
                "loss": loss,
                "layers": old.transpose(layers, [2, 0, 1, 3]),
                "logits": old.einsum("kbd,vd->bkv", seen["query"][0], table) + bias,
                "content_blocked": old.transpose(attention["attn_mask_h"][..., 0], [2, 0, 1]),
                "query_blocked": old.transpose(attention["attn_mask_g"][..., 0], [2, 0, 1]),
                "other_segment": old.transpose(attention["seg_mat"][..., 1], [2, 0, 1]),
                "relative": old.transpose(attention["r"], [1, 0, 2]),
            }
            found |= {f"{number}/{name}": value for name, value in values.items()}
            found["gradient"] = old.convert_to_tensor(old.gradients(loss, [table])[0])
        randomise(session, 2)
        variables = old.trainable_variables()
        save(session, variables[::2], Path(scratch), "even")
        save(session, variables[1::2], Path(scratch), "odd")
        (HERE / "xlnet").mkdir(exist_ok=True)
        parts = [f"{scratch}/even", f"{scratch}/odd"]
        session.run(
            old.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=parts, destination_prefix=str(HERE / "xlnet" / "xlnet_model.ckpt")
            )
        )
        recorded = session.run(found)
        builder.xlnet.XLNetConfig(FLAGS=flags).to_json(str(HERE / "xlnet" / "xlnet_config.json"))
    small = ("content_blocked", "query_blocked", "other_segment")
    return {name: x.astype(bool) if name.endswith(small) else x for name, x in recorded.items()}


def save(session: Any, variables: list[Any], folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    saver = old.train.Saver(variables)
    saver.save(session, str(folder / name), write_meta_graph=False, write_state=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", type=Path, required=True, help="where the clones bert and xlnet are")
    original = parser.parse_args().original.resolve()
    found = {
        "bert": bert(original / "bert"),
        "answers": answers(original / "bert"),
        "xlnet": xlnet(original / "xlnet"),
    }
    for name, recorded in found.items():
        np.savez_compressed(HERE / name / "outputs.npz", **recorded)  # pyright: ignore[reportArgumentType]
        print(name, {key: x.shape for key, x in recorded.items()})


if __name__ == "__main__":
    main()
