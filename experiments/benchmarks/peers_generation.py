"""The other side of generation.py: transformers' GPT-2 124M with a static cache, its step compiled by torch.compile.

    python experiments/benchmarks/generation.py --peers experiments/benchmarks/peers_generation.py

Needs torch and transformers, which nothing else here does. Fresh random weights in bf16, random prompts, greedy, no
token the end. Where the cache is static and the device is a GPU `generate` compiles the step by itself, as CUDA
graphs (`compiled` says whether it did); on a CPU, only to try the script, it does not. Prints a JSON line a batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

TINY = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 511, "eos_token_id": 511}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    config = GPT2Config(**(TINY if options.tiny else {}))
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16).eval()
    for rows in options.batch:
        ids = torch.randint(5, config.vocab_size - 1, (rows, options.prompt), device=device)
        seconds = []
        for _ in range(2 + options.repeats):  # the first two compile and record
            start = time.perf_counter()
            texts = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=options.length,
                max_new_tokens=options.length,
                cache_implementation="static",
                pad_token_id=0,
            ).tolist()
            seconds.append(time.perf_counter() - start)
            assert all(len(text) == options.prompt + options.length for text in texts)
        median = statistics.median(seconds[2:])
        line = {
            "case": "generation",
            "B": rows,
            "prompt": options.prompt,
            "length": options.length,
            "ms": round(median * 1e3, 2),
            "tok_s": round(rows * options.length / median),
            "step_us": round(median / options.length * 1e6, 1),
            "compile_s": round(sum(seconds[:2]) - 2 * median, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if gpu else None,
            "compiled": hasattr(model, "_compiled_call"),
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
