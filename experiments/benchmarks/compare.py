"""Both sides of training speed and memory, in turn, on one device.

    python experiments/benchmarks/compare.py --peers PATH --cases txl xlnet --rounds 2

The peers' script takes names of cases and prints a JSON line for each, with `tok_s` and `mem_gib`; a line with `gpu`
names the card. It and throughput.py run in processes of their own, one after the other: theirs, ours, theirs, ours.
What is left of the command line goes to throughput.py (--data FOLDER keeps its text from call to call).

Prints what either side says on stderr, one JSON line a case with the medians of the rounds, and a table in Markdown:

    theirs, ours        tokens per second, each step waited for
    free_running        ours as a run takes its steps
    ratio               ours / theirs
    theirs_gib, ours_gib, memory_ratio      the most memory in use at once; ours / theirs
    rounds              {"theirs", "ours"}: tokens per second of each

Both do what their code does: transformers' masked models compute the logits of every position, ours of the predicted
ones. bert_mini is for a CPU: its other side is peers_cpu.py, which says how.

Transformer-XL's peer is the original code: kimiyoung/transformer-xl's pytorch/*.py and pytorch/utils/, with `.byte()`
turned into `.bool()`. The peers' script finds it in .scratch/txl below the current folder, or name it with --txl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = {
    "gpt2": "gpt2_nano",
    "gpt2m": "gpt2m_nano",
    "bert128": "bert128",
    "bert512": "bert512",
    "bertL512": "bertL512",
    "xlnet": "xlnet",
    "txl": "txl_compile",
    "bert_mini": "bert_mini",
}
"""Our cases and the peers'."""
OURS = Path(__file__).with_name("throughput.py")

Line = dict[str, Any]


def lines(command: list[str], folder: Path | None = None) -> list[Line]:
    """The JSON lines that a command prints; all that it prints goes to stderr, too."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    sys.stderr.write(result.stdout)
    sys.stderr.flush()
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def measured(case: str, found: list[Line]) -> Line:
    """The line of a case. Raises ValueError if it is not there or tells of an error."""
    line = next((line for line in found if line["case"] == case), {"error": "the script printed no line"})
    if "error" in line:
        raise ValueError(f"{case}: {line['error']}")
    return line


def median(rounds: list[Line], name: str) -> float | None:
    """None if a round does not tell."""
    values = [line[name] for line in rounds if line.get(name) is not None]
    return round(statistics.median(values), 4) if len(values) == len(rounds) else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else round(ours / theirs, 3)


def summary(case: str, device: str, theirs: list[Line], ours: list[Line]) -> Line:
    """The medians of a case's rounds."""
    speeds, memories = (median(theirs, "tok_s"), median(ours, "tokens_per_second")), ("mem_gib", "peak_gib")
    their_memory, our_memory = (median(side, name) for side, name in zip((theirs, ours), memories, strict=True))
    return {
        "case": case,
        "device": device,
        "theirs": speeds[0],
        "ours": speeds[1],
        "free_running": median(ours, "free_running"),
        "ratio": ratio(speeds[1], speeds[0]),
        "mfu": median(ours, "mfu"),
        "ceiling_tflops": median(ours, "ceiling_tflops"),
        "theirs_gib": their_memory,
        "ours_gib": our_memory,
        "memory_ratio": ratio(our_memory, their_memory),
        "paths": ours[-1]["paths"],
        "rounds": {
            "theirs": [line["tok_s"] for line in theirs],
            "ours": [line["tokens_per_second"] for line in ours],
        },
    }


def table(results: list[Line]) -> str:
    """The results in Markdown."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:,.0f}" if isinstance(value, float | int) else str(value)

    rows = [
        "| case | theirs, tokens/s | ours | ratio | free running | MFU | theirs, GiB | ours | ratio |",
        "|---" * 9 + "|",
    ]
    for line in results:
        numbers = [cell(line[name]) for name in ("theirs", "ours")]
        others = [line[name] for name in ("mfu", "theirs_gib", "ours_gib", "memory_ratio")]
        shown = [line["case"], *numbers, line["ratio"], cell(line["free_running"]), *others]
        rows.append("| " + " | ".join("" if value is None else str(value) for value in shown) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the other side's script")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "bert_mini"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--txl", type=Path, help="the original Transformer-XL's files; default: .scratch/txl")
    options, others = parser.parse_known_args()
    if not options.peers.is_file():
        parser.error(f"--peers {options.peers} is not there: name the script of the other side")
    results, failed = [], False
    with tempfile.TemporaryDirectory() as kept:
        folder = None
        if options.txl is not None:
            folder = Path(kept)
            (folder / ".scratch").mkdir()
            (folder / ".scratch" / "txl").symlink_to(options.txl.resolve())
        # -P: the modules beside the script, such as kernels.py, are not those of that name that transformers asks for
        peers = [sys.executable, "-P", str(options.peers.resolve())]
        own = [sys.executable, str(OURS), "--data", f"{kept}/data", *others, "--cases"]
        for case in options.cases:
            device, theirs, ours = "", [], []
            try:
                for _ in range(options.rounds):
                    found = lines([*peers, CASES[case]], folder)
                    theirs.append(measured(CASES[case], found))
                    ours.append(measured(case, lines([*own, case])))
                    device = next((line["gpu"] for line in found if "gpu" in line), ours[-1]["device"])
                results.append(summary(case, device, theirs, ours))
                print(json.dumps(results[-1]), flush=True)
            except ValueError as error:
                failed = True
                print(json.dumps({"case": case, "error": str(error)}), flush=True)
    print(table(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
