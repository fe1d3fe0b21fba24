"""Records what the original implementations compute, for tests that run without them (`make golden`).

Each case is a folder beside this file: config.json and tensors in the original layout, and record.npz with inputs and
outputs. Recorded again, all have the same bytes but the tensors of torch's old format, which holds addresses.

Needs torch and transformers; Hugging Face's Transformer-XL needs an older one (4.35.2), which then records nothing
else. The original Transformer-XL code is not packaged: clone github.com/kimiyoung/transformer-xl and name its pytorch
folder.

    python -m tests.golden.record [--only NAME]
    python -m tests.golden.record --original transformer-xl/pytorch
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.golden.cases import CASES, Arrays, Case

HERE = Path(__file__).parent


def build(case: Case) -> Any:
    """The model of a case, without dropout; tensors are still to be drawn."""
    if case.kind == "MemTransformerLM":
        from mem_transformer import MemTransformerLM  # pyright: ignore[reportMissingImports]

        c = dict(case.config)
        sizes = [c.pop(name) for name in ("vocab_size", "n_layer", "n_head", "d_model", "d_head", "d_inner")]
        tied = [False] + [True] * len(c["cutoffs"])
        return MemTransformerLM(*sizes, 0.0, 0.0, tie_weight=True, tie_projs=tied, tgt_len=case.length, ext_len=0, **c)
    kind = getattr(transformers, case.kind)
    return kind(kind.config_class(**case.config))


def batches(case: Case, seed: int) -> list[Arrays]:
    """The windows that a case reads, with targets and weights (0 where nothing is predicted)."""
    rng = np.random.default_rng(seed)
    shape = (case.rows, case.length)
    found = []
    for window in range(case.windows):
        tokens = rng.integers(2, case.config["vocab_size"], shape)
        documents = np.ones(shape, np.int32)
        if case.padding != "nowhere" and window == case.windows - 1:  # what is remembered is seen, padding too
            for row in range(1, case.rows):
                padded = slice(0, row) if case.padding == "left" else slice(case.length - 2 * row, None)
                documents[row, padded], tokens[row, padded] = 0, case.pad
        batch: Arrays = {
            "tokens": tokens,
            "documents": documents,
            "positions": np.tile(np.arange(case.length), (case.rows, 1)),
        }
        if case.segments:
            batch["segments"] = np.sort(rng.integers(0, case.segments, shape), axis=1)
        weights = (rng.random(shape) < 0.7) * (documents != 0)
        if case.targets:
            places = np.stack([2 + np.sort(rng.permutation(case.length - 2)[: case.targets]) for _ in range(case.rows)])
            batch["ranks"] = np.zeros(shape, np.int64)
            ranks = np.stack([1 + rng.permutation(case.targets) for _ in range(case.rows)])
            np.put_along_axis(batch["ranks"], places, ranks, axis=1)
            batch["target_positions"] = places
            weights = np.ones(places.shape)
        if case.reversed:
            batch["reversed"] = np.arange(case.rows) >= case.rows // 2
        batch["targets"] = rng.integers(0, case.config["vocab_size"], weights.shape)
        batch["target_weights"] = weights.astype(np.float32)
        batch["relation"] = rng.integers(0, case.config.get("num_labels", 2), case.rows)
        found.append(
            {name: x if x.dtype in (np.float32, np.bool_) else x.astype(np.int64) for name, x in batch.items()}
        )
    return found


def run(case: Case, model: Any, windows: list[Arrays]) -> Arrays:
    """What the model gives for each window ("0/logits", ...), the loss of the last one, a sum, and its gradient."""
    found: Arrays = {}
    memory, output, loss = None, {}, torch.zeros(())
    for number, batch in enumerate(windows):
        output = case.read(model, batch, memory)
        memory = [x.detach() for x in output.pop("memory", ())] or None
        found |= {f"{number}/{name}": x.detach().numpy() for name, x in output.items()}
    batch = windows[-1]
    scores = output.get("logits", output.get("log_probabilities"))
    if scores is not None:
        nll = -scores.log_softmax(-1).gather(-1, torch.tensor(batch["targets"])[..., None])[..., 0]
        loss = loss + (nll * torch.tensor(batch["target_weights"])).sum()
    if "token_classes" in output:
        targets = torch.tensor(batch["targets"]) % output["token_classes"].shape[-1]
        nll = torch.nn.functional.cross_entropy(output["token_classes"].mT, targets, reduction="none")
        loss = loss + (nll * torch.tensor(batch["target_weights"])).sum()
    if "classes" in output:
        loss = loss + torch.nn.functional.cross_entropy(
            output["classes"], torch.tensor(batch["relation"]), reduction="sum"
        )
    model.zero_grad()
    loss.backward()
    found["loss"] = loss.detach().numpy()
    found[f"gradient/{case.table}"] = dict(model.named_parameters())[case.table].grad.numpy()
    return found


def randomise(case: Case, model: Any, seed: int) -> Any:
    """Draws every tensor, gains around 1, so that nothing is 0 or 1 by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, case.std, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 1.0
            parameter *= case.changes.get(name, 1.0)
    return model.eval()


def keep(case: Case, model: Any, folder: Path) -> None:
    """config.json and tensors, in one of the forms in which there are such folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    if case.kind == "MemTransformerLM":
        config = {"model_type": "transfo-xl", "untie_r": False, **case.config}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if case.files == "shards" else "1GB")
    if case.files in ("bin", "old"):
        for file in folder.glob("*.safetensors"):
            file.unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=case.files == "bin")
    (folder / "generation_config.json").unlink(missing_ok=True)


def record(name: str, folder: Path, seed: int) -> None:
    """Writes a case's folder."""
    case = CASES[name]
    model = randomise(case, build(case), seed)
    keep(case, model, folder)
    windows = batches(case, seed)
    inputs = {f"{number}/batch/{key}": x for number, batch in enumerate(windows) for key, x in batch.items()}
    np.savez_compressed(folder / "record.npz", **inputs, **run(case, model, windows))  # pyright: ignore[reportArgumentType]


def find_original(folder: Path) -> None:
    """Makes the code of kimiyoung/transformer-xl importable, which is older than boolean masks and asks for CUDA."""
    sys.path[:0] = [str(folder), str(folder / "utils")]
    torch.version.cuda = torch.version.cuda or "0.0"
    torch.Tensor.byte = torch.Tensor.bool  # pyright: ignore[reportAttributeAccessIssue]


def possible(original: bool) -> list[str]:
    """The cases of this environment: an older transformers is there for Transformer-XL alone."""
    old = "TransfoXLLMHeadModel"
    kinds = {case.kind for case in CASES.values()} - {old, "MemTransformerLM"}
    here = {"MemTransformerLM"} if original else {old} if hasattr(transformers, old) else kinds
    return [name for name, case in CASES.items() if case.kind in here]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", type=Path, help="the pytorch folder of kimiyoung/transformer-xl")
    parser.add_argument("--only", help="one case")
    options = parser.parse_args()
    if options.original:
        find_original(options.original)
    for name in possible(options.original is not None):
        if options.only in (None, name):
            record(name, HERE / name, seed=len(name))
            print(name)


if __name__ == "__main__":
    main()
