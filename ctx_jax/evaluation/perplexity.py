"""How well a model predicts a split: sums over its predictions divided by their number, each token once.

Models with memory read lanes and carry it from batch to batch; models without one read overlapping windows, whose
reader leaves only the positions behind the overlap to be predicted. Either way the result says how it was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ctx_jax.contract import Batch, Objective, Reader, TokenStore, Variables
from ctx_jax.objectives.causal import Causal
from ctx_jax.training.metrics import Diverged

Sums = dict[str, Any]
"""{"terms": {name: (sum, count)}, "metrics": {name: (sum, count)}} of a whole pass, and "outputs": [those of each
batch] if the objective has any."""
EvalStep = Callable[[Variables, Any, Batch], tuple[Any, Any]]
"""(variables, memory, batch) -> (sums of the batch, memory): `training.step.make_eval_step`."""


def evaluate(
    step: EvalStep,
    variables: Variables,
    memory: Any,
    batches: Iterable[Batch],
    *,
    objective: Objective,
    reader: Reader,
    store: TokenStore,
    memory_length: int = 0,
) -> dict[str, Any]:
    """One ordered pass over `store`: how it was read (`declare`) and what was found (`measure`)."""
    sums = accumulate(step, variables, memory, batches)
    return {**declare(reader, memory_length), **measure(sums, objective, reader, store)}


def accumulate(step: EvalStep, variables: Variables, memory: Any, batches: Iterable[Batch]) -> Sums:
    """Adds up what `step` returns over the batches, in float64, the memory carried along.

    Raises ValueError if there is no batch.
    """
    fetched, latest = [], None
    for batch in batches:
        sums, memory = step(variables, memory, batch)
        if latest is not None:
            fetched.append(jax.device_get(latest))  # one behind, while the device computes the next
        latest = sums
    if latest is None:
        raise ValueError("evaluation has no batch: give the split more text")
    fetched.append(jax.device_get(latest))
    outputs = [sums.pop("outputs") for sums in fetched if "outputs" in sums]
    total = jax.tree.map(lambda *values: math.fsum(values), *fetched)
    return {**total, "outputs": outputs} if outputs else total


def declare(reader: Reader, memory_length: int) -> dict[str, Any]:
    """How a split is read: {"reader", "target_length", "stride", "memory_length"}, in tokens."""
    return {
        "reader": type(reader).__name__,
        "target_length": reader.length,
        "stride": getattr(reader, "step", None) or getattr(reader, "stride", None) or reader.length,
        "memory_length": memory_length,
    }


def measure(sums: Sums, objective: Objective, reader: Reader, store: TokenStore) -> dict[str, float]:
    """The numbers of a pass over `store`:

    loss                    the sum of the terms' means: what training minimises, but for label smoothing and z-loss
    each term               its mean, where there are several
    tokens or targets       how many predictions there were (of every token: causal; of chosen ones: other objectives)
    nll, standard_error     nats per prediction; the error of this mean takes the predictions as independent
    perplexity              exp(nll), if that is a finite number; causal objectives only
    bits_per_byte           sum of the nll / ln 2 / UTF-8 bytes of the text; causal objectives only, and only if every
                            token was predicted once that can be: all but the first of each document, or but the first
                            of the stream where the reader joins documents
    unknown                 tokens of the text that the tokenizer does not know, if any: then there are no bits per
                            byte, since the text cannot be told from the tokens
    accuracy, ...           the means of the objective's other metrics, where they have a count

    what the store's own `measure` finds of the objective's outputs, if there are any (the metrics of a task)

    What counts predictions is there if the objective emits the metrics "nll" and "nll_squared".

    Raises ValueError if nothing was predicted, Diverged if the loss is no finite number.
    """
    means = {name: total / count for name, (total, count) in sums["metrics"].items() if count}
    counts = [count for _, count in sums["terms"].values()]
    if not any(counts):
        raise ValueError("evaluation predicted nothing: give the split more text or evaluate more batches")
    result = {"loss": math.fsum(total / count for total, count in sums["terms"].values() if count)}
    if not math.isfinite(result["loss"]):
        raise Diverged(f"the evaluation's loss is {result['loss']}: go back to an earlier checkpoint")
    if len(counts) > 1:
        result |= {term: total / count for term, (total, count) in sums["terms"].items() if count}
    if "outputs" in sums:
        means |= store.measure(sums["outputs"])  # pyright: ignore[reportAttributeAccessIssue]
    if "nll" not in means:
        return {**result, **means}
    total, count = sums["metrics"]["nll"]
    causal = isinstance(objective, Causal)
    nll, squares = means.pop("nll"), means.pop("nll_squared")
    variance = max(0.0, squares - nll**2) * count / max(1.0, count - 1)
    result |= {
        "tokens" if causal else "targets": round(count),
        "nll": nll,
        "standard_error": math.sqrt(variance / count),
    }
    if causal:
        if nll < 700:  # beyond, exp overflows
            result["perplexity"] = math.exp(nll)
        vocabulary = store.vocabulary
        unknown = int(np.count_nonzero(store.tokens == vocabulary.unknown))
        if unknown and vocabulary.unknown not in vocabulary.special:  # GPT-2's one special id is also that
            result["unknown"] = unknown
        elif round(count) == predictable(reader, store):
            result["bits_per_byte"] = total / math.log(2) / int(store.document_bytes.sum())
    return {**result, **means}


def predictable(reader: Reader, store: TokenStore) -> int:
    """How many tokens have one before them that they can be predicted from, in their document or in the stream."""
    joined = getattr(reader, "join_documents", False)
    return len(store.tokens) - (1 if joined else len(store.document_bytes))
