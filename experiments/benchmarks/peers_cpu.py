"""The other side of bert_mini: a train step of transformers' BertForMaskedLM by PyTorch, eager, on the CPU.

    cd experiments/benchmarks; JAX_PLATFORMS=cpu python compare.py --peers peers_cpu.py --cases bert_mini

Needs torch and transformers, which nothing else here does. Prints one JSON line for `compare.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import BertConfig, BertForMaskedLM  # pyright: ignore[reportMissingImports]

ROWS, LENGTH, VOCABULARY = 32, 128, 30_522
WARM, STEPS = 3, 10


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    labels = torch.where(torch.rand(ROWS, LENGTH) < 0.15, tokens, -100)
    seconds, losses = [], []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARM:])
    line = {
        "case": "bert_mini",
        "B": ROWS,
        "T": LENGTH,
        "params_m": round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1),
        "ms": round(median * 1e3, 2),
        "tok_s": round(ROWS * LENGTH / median),
        "loss": round(losses[-1], 3),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["bert_mini"]:
        sys.exit("error: the only case is bert_mini")
    main()
