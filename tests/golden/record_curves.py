"""Records how GPT-2 and BERT train in PyTorch from recorded weights (`record`): 20 steps of AdamW with the usual
groups without decay, clipping, and a linear warm-up and decay; fp32, no dropout. Needs torch and transformers.

    python -m tests.golden.record_curves
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
STEPS, TOTAL, WARMUP = 20, 25, 5
RATE, DECAY, CLIP = 5e-3, 0.1, 1.0
NO_DECAY = ("bias", "LayerNorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
UNSEEN = -100
"""The label of what is not predicted."""
Batch = dict[str, list[Any]]


def gpt2_batch(rng: np.random.Generator, config: Any) -> Batch:
    """Rows of one token more than the model reads; their last tokens are padding."""
    tokens = rng.integers(1, config.vocab_size, (3, 14))
    return {"tokens": tokens.tolist(), "lengths": rng.integers(8, 15, 3).tolist()}


def gpt2_loss(model: Any, batch: Batch) -> Any:
    tokens, lengths = torch.tensor(batch["tokens"]), torch.tensor(batch["lengths"])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    labels = torch.where(real, tokens, UNSEEN)
    return model(input_ids=tokens, attention_mask=real.long(), labels=labels).loss


def bert_batch(rng: np.random.Generator, config: Any) -> Batch:
    """Four predicted places of each row, the last of them not counted in the first row."""
    tokens, lengths = rng.integers(5, config.vocab_size, (3, 13)), rng.integers(9, 14, 3)
    places = [sorted(rng.permutation(length)[:4].tolist()) for length in lengths]
    return {
        "tokens": tokens.tolist(),
        "lengths": lengths.tolist(),
        "segments": np.sort(rng.integers(0, 2, tokens.shape), axis=1).tolist(),
        "places": places,
        "targets": rng.integers(0, config.vocab_size, (3, 4)).tolist(),
        "relation": rng.integers(0, 2, 3).tolist(),
    }


def bert_loss(model: Any, batch: Batch) -> Any:
    arrays = {name: torch.tensor(x) for name, x in batch.items()}
    targets = arrays["targets"].clone()
    targets[0, -1] = UNSEEN
    labels = torch.full_like(arrays["tokens"], UNSEEN).scatter(1, arrays["places"], targets)
    return model(
        input_ids=arrays["tokens"],
        attention_mask=(torch.arange(labels.shape[1]) < arrays["lengths"][:, None]).long(),
        token_type_ids=arrays["segments"],
        labels=labels,
        next_sentence_label=arrays["relation"],
    ).loss


def curve(model: Any, make: Callable[..., Batch], loss_of: Callable[..., Any]) -> dict[str, Any]:
    """Batches, and before each update loss, norm of the gradient and learning rate."""
    named = list(model.named_parameters())
    spared = [p for name, p in named if name.endswith(NO_DECAY)]
    decayed = [p for name, p in named if not name.endswith(NO_DECAY)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL)
    rng = np.random.default_rng(7)
    found: dict[str, list[Any]] = {"batches": [], "losses": [], "norms": [], "rates": []}
    for _ in range(STEPS):
        batch = make(rng, model.config)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found["batches"].append(batch)
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
        found["rates"].append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def main() -> None:
    gpt2 = transformers.GPT2LMHeadModel.from_pretrained(HERE / "gpt2_lm").eval()
    bert = transformers.BertForPreTraining.from_pretrained(HERE / "bert_pretraining").eval()
    settings = {"total": TOTAL, "warmup": WARMUP, "rate": RATE, "decay": DECAY, "clip": CLIP}
    curves = {
        "settings": settings,
        "gpt2_lm": curve(gpt2, gpt2_batch, gpt2_loss),
        "bert_pretraining": curve(bert, bert_batch, bert_loss),
    }
    (HERE / "curves.json").write_text(json.dumps(curves) + "\n")
    for name in ("gpt2_lm", "bert_pretraining"):
        print(name, *(f"{loss:.3f}" for loss in curves[name]["losses"]))


if __name__ == "__main__":
    main()
