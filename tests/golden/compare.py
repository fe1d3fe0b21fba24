"""What our models give for a recorded case, beside the record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.contract import Memory
from ctx_jax.interop import KINDS, Imported, import_folder, rules_of
from ctx_jax.interop.layout import parameter_shapes, save

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in HERE.glob("*/record.npz"))
Arrays = dict[str, np.ndarray]


class Compared(NamedTuple):
    """A value that the original has and ours, where it means something."""

    name: str
    theirs: np.ndarray
    ours: np.ndarray

    @property
    def error(self) -> np.ndarray:
        return np.abs(self.theirs - self.ours)


def windows_of(record: Arrays) -> list[Arrays]:
    """The batches of a record."""
    count = 1 + max(int(name.partition("/")[0]) for name in record if name[0].isdigit())
    starts = [f"{number}/batch/" for number in range(count)]
    return [{name.removeprefix(start): x for name, x in record.items() if name.startswith(start)} for start in starts]


def first_memory(imported: Imported, rows: int) -> Any:
    """Hugging Face's Transformer-XL starts with a memory of zeros that everybody sees, the others with an empty one."""
    empty = imported.config.build().init_memory(rows)
    return Memory(empty.hidden, jnp.ones_like(empty.documents)) if imported.kind == "TransfoXLLMHeadModel" else empty


def ours(imported: Imported, record: Arrays) -> Arrays:
    """Our values by the record's names."""
    model = imported.config.build()
    windows = windows_of(record)

    def read(params: Any, batch: Any, memory: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params}
        inputs = {name: x for name, x in batch.items() if name not in ("targets", "target_weights", "relation")}
        output = model.apply(variables, inputs, memory, collect=("layers",))
        found, loss = {"layers": output.layers, "hidden": output.hidden}, jnp.zeros(())
        hidden = output.hidden if output.query is None else output.query
        if "lm" in parts_of(imported):
            found["logits"] = model.apply(variables, hidden, method="logits")
            found["log_probabilities"] = jax.nn.log_softmax(found["logits"])
            scores = model.apply(variables, hidden, batch["targets"], batch["target_weights"], method="score")
            loss += scores.total
        if getattr(imported.config, "token_classes", None):
            found["token_classes"] = model.apply(variables, hidden, method="classify_tokens")
            chances = jax.nn.log_softmax(found["token_classes"])
            targets = batch["targets"] % chances.shape[-1]
            nll = -jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0]
            loss += (nll * batch["target_weights"]).sum()
        if getattr(imported.config, "classes", None):
            found["classes"] = model.apply(variables, output.pooled, method="classify")
            chances = jax.nn.log_softmax(found["classes"])
            loss -= jnp.take_along_axis(chances, batch["relation"][:, None], axis=1).sum()
        return loss, (found, output.memory)

    absent = {path: np.zeros(parameter_shapes(imported.config)[path], np.float32) for path in imported.absent}
    params = unflatten_dict({**flatten_dict(imported.params, sep="/"), **absent}, sep="/")
    quick = {"xla_backend_optimization_level": 0}  # each runs once or twice: compiling takes most of the time
    step = jax.jit(jax.value_and_grad(read, has_aux=True), compiler_options=quick)
    memory, found, loss, gradient = first_memory(imported, len(windows[0]["tokens"])), {}, None, None
    for number, batch in enumerate(windows):
        (loss, (values, memory)), gradient = step(params, batch, memory)
        found |= {f"{number}/{name}": np.asarray(x) for name, x in values.items()}
    family = KINDS[imported.kind]
    (name,) = (name.removeprefix("gradient/") for name in record if name.startswith("gradient/"))
    rules = rules_of(
        family, imported.config, parts_of(imported), family.prefix if name.startswith(family.prefix) else ""
    )
    # their names for the gradients of what is ours
    gradients = dict(save([rule for rule in rules if name in rule.theirs], flatten_dict(gradient, sep="/")))
    return {**found, "loss": np.asarray(loss), f"gradient/{name}": gradients[name]}


def parts_of(imported: Imported) -> frozenset[str]:
    """The parts of the model; one without heads of its own has the tied softmax."""
    parts = KINDS[imported.kind].kinds[imported.kind]
    return parts if parts - {"original"} else parts | {"lm"}


def compared(imported: Imported, record: Arrays) -> list[Compared]:
    """Each recorded value with ours, padding left out."""
    values = ours(imported, record)
    found = []
    for name, theirs in record.items():
        window, _, kind = name.partition("/")
        if "/batch/" in name:
            continue
        mine = values[name]
        assert mine.shape == theirs.shape, name
        real = record[f"{window}/batch/documents"] != 0 if window.isdigit() else np.ones(())
        if kind == "layers":
            theirs, mine = (np.moveaxis(x, 1, 2)[real] for x in (theirs, mine))
        elif kind != "classes" and real.ndim and theirs.shape[:2] == real.shape:
            theirs, mine = theirs[real], mine[real]
        found.append(Compared(name, theirs, mine))
    return found


def load_record(folder: Path) -> Arrays:
    with np.load(folder / "record.npz") as file:
        return dict(file)


def main() -> None:
    for name in sys.argv[1:] or CASES:
        imported = import_folder(HERE / name)
        for one in compared(imported, load_record(HERE / name)):
            size, most, mean = np.abs(one.theirs).mean(), one.error.max(), one.error.mean()
            print(f"{name:32} {one.name:50} size {size:9.4f}  error {most:.2e}  mean {mean:.2e}")


if __name__ == "__main__":
    main()
