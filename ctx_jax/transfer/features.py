"""Frozen features: what a pretrained model's layers say of a text (Devlin et al. 2018, section 5.3; Reimers & Gurevych
2019, arXiv 1908.10084).

    file -> texts -> rows -> batches of equal length -> layers -> combination -> pooling -> .npz or .safetensors

A text's features depend on nothing else in the file: its row is padded to a length that follows from its own, padding
is never seen, and a memory is empty.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, Variables
from ctx_jax.data import check_writable
from ctx_jax.data.files import Errors
from ctx_jax.data.tokenizers import Tokenizer, utf8_size
from ctx_jax.objectives.pooling import Pooling, pooled
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.progress import reading, tell
from ctx_jax.runs import Trained, divisible_rows, open_run
from ctx_jax.signals import Interrupted
from ctx_jax.training.step import on_mesh
from ctx_jax.transfer.arrays import Vectors, check_output, save
from ctx_jax.transfer.inputs import Row, Template, grouped, row_length, template
from ctx_jax.transfer.texts import input_file, input_size, texts

Combination = Literal["concatenate", "sum", "mean"]


@dataclass(frozen=True)
class Choice:
    """Which vectors of a model are the features."""

    layers: tuple[int, ...] = (-1,)
    """0 = the embedding, 1 = the first layer, -1 = the last; several are combined. The last is what the model's heads
    read: after the final LayerNorm where it has one (GPT-2)."""
    combine: Combination = "concatenate"
    """What becomes of several layers: concatenate (in the order given), sum or mean."""
    pooling: Pooling = "mean"
    """What becomes of a text's tokens, special ones included: their mean, the first ([CLS] of BERT), the last (the
    classification token of XLNet), the maximum of each channel, pooled (the model's own pooler), word (a vector a word:
    the mean of its tokens) or none (a vector a token)."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("--layers is given no layer: give one or more, or leave the option out")


def numbered(choice: Choice, count: int) -> tuple[int, ...]:
    """The layers as numbers from 0 (the embedding) to `count`. Raises ValueError for one that the model does not have,
    or for any but the last with a pooler, which reads that one."""
    for layer in choice.layers:
        if not -count - 1 <= layer <= count:
            raise ValueError(
                f"--layers {layer}: the model has {count} layers; choose from 0 (the embedding) to {count}, or from -1 "
                f"(the last) to {-count - 1}"
            )
    found = tuple(layer % (count + 1) for layer in choice.layers)
    if choice.pooling == "pooled" and found != (count,):
        raise ValueError("--pooling pooled: the pooler reads the last layer alone, leave --layers out")
    return found


def features(model: Any, choice: Choice, variables: Variables, batch: Batch) -> jax.Array:
    """Features in fp32: [B, D], or [B, T, D] where `pooling` is none or word (a row's first vectors are its words).

    D is the model's width, or that of all layers together. Raises ValueError for a pooler that the model lacks.
    """
    last = model.config.layers
    chosen = numbered(choice, last)
    output = model.apply(variables, batch, collect=() if set(chosen) == {last} else ("layers",))
    if choice.pooling == "pooled":
        if output.pooled is None:
            raise ValueError(f"--pooling pooled: this {type(model).__name__} has no pooler, choose mean, first or last")
        return output.pooled.astype(jnp.float32)
    layers = [output.hidden if layer == last else output.layers[:, layer] for layer in chosen]
    hidden = combined([layer.astype(jnp.float32) for layer in layers], choice.combine)
    return pooled(hidden, batch["documents"] > 0, batch["words"], choice.pooling)


def combined(layers: list[jax.Array], how: Combination) -> jax.Array:
    """Layers [B, T, D] as one; concatenated, they are wider."""
    if how == "concatenate":
        return jnp.concatenate(layers, axis=-1)
    total = jnp.sum(jnp.stack(layers), axis=0)
    return total / len(layers) if how == "mean" else total


class Rows:
    """The rows of texts, or of pairs of them, each with the place of its first vector; to be read once."""

    def __init__(
        self, shape: Template, tokenizer: Tokenizer, length: int, pooling: Pooling, texts: Iterable[Sequence[str]]
    ) -> None:
        self.shape, self.length = shape, length
        self.offsets = array("q", [0])
        """Place of each text's first vector, and of the one after the last."""
        self.cut = self.bytes = 0
        """Texts that were cut, and bytes of text, so far."""
        self._tokenizer, self._pooling, self._texts = tokenizer, pooling, texts

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for own in self._texts:
            row = self.shape.row([self._tokenizer.encode(text) for text in own], self.length)
            place = self.offsets[-1]
            self.offsets.append(place + self.count(row))
            self.cut += row.cut
            self.bytes += sum(utf8_size(text) + 1 for text in own)
            yield place, row

    def count(self, row: Row) -> int:
        """How many vectors a row has."""
        if self._pooling == "none":
            return len(row.tokens)
        return int(row.words.max()) if self._pooling == "word" else 1


def extract(
    path: Path,
    source: str,
    output: Path,
    choice: Choice,
    *,
    checkpoint: str = "last",
    length: int | None = None,
    batch_size: int = 32,
    field: str | None = None,
    errors: Errors = "strict",
) -> dict[str, Any]:
    """Writes the features of the texts in a file by a checkpoint of a run, in little memory.

    `output` holds `features`: [N, D], row i of text i; or [M, D] where there is a vector a token or a word, of which
    rows offsets[i] to offsets[i + 1] are text i's, with `offsets` [N + 1] int64. An empty text is its special tokens,
    and has no word. A word is what stands between white space; one that is cut off has no vector.

    Args:
        checkpoint: as `runs.open_run`.
        source: a file of lines or of JSON lines, "-" for standard input.
        length: tokens of a text, special ones included, beyond which it is cut; None = as many as the model has
            positions for, or 512.
        field: the text's field in lines of JSON; None = "text" in .jsonl files, and others are no JSON.

    Returns {"run", "step", "output", "texts", "features": their shape, "cut": how many texts were, "length", "layers",
    "combine", "pooling"}.

    Raises ValueError or FileNotFoundError with one line, Interrupted on Ctrl-C; nothing is left behind then.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size {batch_size} is not a number of texts: choose 1 or more")
    check_output(output)
    check_writable(output)
    file = input_file(source)
    run = open_run(path, checkpoint)
    config = run.experiment.model
    layers = numbered(choice, config.layers)
    shape = template(config, run.tokenizer.vocabulary)
    length = row_length(config, shape, length)
    size = divisible_rows(run.mesh, batch_size)
    rows = Rows(shape, run.tokenizer, length, choice.pooling, ((text,) for text in texts(file, field, errors)))
    try:
        written = write(run, choice, rows, size, input_size(file), output)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was written, the same command begins anew") from None
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} (nothing is left of it)", str(output)) from None
    count = len(rows.offsets) - 1
    if rows.cut:
        tell(f"note: {rows.cut:,} of {count:,} texts are longer than {length} tokens (--length) and were cut")
    result = {"run": str(path), "step": run.step, "output": str(output), "texts": count, "features": written}
    about = {"layers": layers, "combine": choice.combine, "pooling": choice.pooling}
    return {**result, "cut": rows.cut, "length": length, **about}


def write(run: Trained, choice: Choice, rows: Rows, size: int, total: int | None, output: Path) -> list[int]:
    """Writes the features of all rows, `size` at a time; `total` are about the bytes of text. Returns their shape."""
    sharding = batch_sharding(run.mesh)
    step = jax.jit(on_mesh(run.mesh, partial(features, run.model, choice)), out_shardings=sharding)
    empty = rows.shape.batch([], size, rows.length)
    width = jax.eval_shape(step, run.variables, empty).shape[-1]  # what is wrong is known before anything is read

    def results() -> Iterator[tuple[list[tuple[int, Row]], Batch, jax.Array]]:
        for length, group in grouped(rows, size, rows.length):
            batch = rows.shape.batch([row for _, row in group], size, length)
            yield group, batch, step(run.variables, jax.device_put(batch, sharding))

    output.parent.mkdir(parents=True, exist_ok=True)
    # A file without a name is gone with the process, however that ends.
    with reading("features", total, "texts") as report, tempfile.TemporaryFile(dir=output.parent) as file:
        vectors, done = Vectors(file, width), 0
        # The devices compute a batch while the next is tokenized and the one before is written.
        for (group, batch, result), _ in pairwise(chain(results(), [None])):  # pyright: ignore[reportGeneralTypeIssues]
            found = np.asarray(result)
            for (place, row), real, own in zip(group, batch["documents"] > 0, found, strict=False):
                own = own[real] if choice.pooling == "none" else own.reshape(-1, width)
                vectors.write(place, own[: rows.count(row)])
            done += len(group)
            report(done, rows.bytes)
        if not done:
            raise ValueError("there is no text in --input: give one a line")
        arrays = {"features": vectors.array()}
        if choice.pooling in ("none", "word"):
            arrays["offsets"] = np.array(rows.offsets)
        save(output, arrays)
        return list(arrays["features"].shape)
