"""`python -m ctx_jax sweep`: the runs of a sweep on this host, on Slurm, or as lines for another launcher."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ctx_jax import experiment
from ctx_jax.data import write_durably
from ctx_jax.signals import Interrupted, Preempted
from launch import local, slurm
from launch.command import output_of, program, tell, with_input
from launch.slurm import Slurm
from launch.sweep import Configure, Planned, groups, planned, records

LOG, RESULTS, GROUPS = "log.txt", "results.jsonl", "groups.json"

COLUMNS = {
    "step": ",d",
    "loss": ".4f",
    "validation loss": ".4f",
    "validation bits_per_byte": ".4f",
    "tokens_per_second": ",.0f",
}
"""What the table shows of a result, and how."""


@dataclass(frozen=True)
class Sweep:
    """Run all experiments of a sweep. Those that are finished are left out; called again, it goes on."""

    launcher: Literal["local", "slurm", "print"] = "local"
    """on this host; as an array of Slurm jobs; or only print the commands, for other launchers"""
    jobs: int | None = None
    """how many run at a time; default: one on this host, all that fit on Slurm"""
    gpus: int | None = None
    """GPUs of each run on this host; default: it sees all of them"""
    seeds: int | None = None
    """run each experiment with so many seeds, 0, 1, ..., and show the mean and the spread of what they reach"""
    retry_failed: bool = False
    """also run again what failed"""
    folder: Path | None = None
    """of the runs and their results; default: runs/sweeps/<file>-<function>"""
    slurm: Slurm = Slurm()

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs}: choose 1 or more")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds}: choose 1 or more")


def run(name: str, options: Sweep, configure: Configure | None = None) -> dict[str, Any]:
    """Returns {"sweep": folder, "finished", "failed", "left": counts, "results": `sweep.records`, "groups":
    `sweep.groups`}, with "job", "script" or "commands" of what another program is to run.

    Args:
        configure: as `sweep.planned`.

    Raises ChildProcessError if a run has failed, Interrupted or Preempted if runs were stopped.
    """
    folder, plans = planned(name, options.folder, configure, options.seeds)
    wanted = ("waiting", "unfinished", *(["failed"] if options.retry_failed else []))
    due = [plan for plan in plans if plan.state in wanted]
    for plan in due:
        experiment.save(plan.experiment, plan.folder / "experiment.json")
    tell(f"{folder}: {len(plans)} experiments, {len(due)} to run")
    commands = [train(plan) for plan in due]
    launched: dict[str, Any] = {}
    came: list[int] = []
    if options.launcher == "print":
        launched["commands"] = [shlex.join(command) for command in commands]
        print(*launched["commands"], sep="\n", file=sys.stderr)
    elif options.launcher == "slurm" and due:
        launched = submitted(folder, due, commands, options)
    elif due:
        came = here(due, commands, options.jobs or 1, options.gpus)
    found = records(plans)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / RESULTS, "".join(json.dumps(record) + "\n" for record in found))
    grouped = groups(plans, found)
    write_durably(folder / GROUPS, json.dumps(grouped, indent=2) + "\n")
    show(found, Console(stderr=True))
    show_groups(grouped, Console(stderr=True))
    for record in found:
        if "error" in record:
            tell(f"{record['name']}: {record['error']}")
    states = [record["state"] for record in found]
    if came:
        kind = Interrupted if came[0] == signal.SIGINT else Preempted
        raise kind("stopped, and what ran has saved: the same command goes on")
    if options.launcher == "local" and set(states) != {"finished"}:
        bad = next(record for record in found if record["state"] != "finished")
        remedy = "--retry-failed runs it again" if bad["state"] == "failed" else "the same command goes on"
        raise ChildProcessError(
            f"{len(states) - states.count('finished')} of {len(states)} runs are not finished; {bad['name']}: "
            f"{bad.get('error') or last_line(Path(bad['run']) / LOG) or bad['state']}; {remedy}"
        )
    counts = {"finished": states.count("finished"), "failed": states.count("failed")}
    left = len(states) - sum(counts.values())
    return {"sweep": str(folder), **counts, "left": left, **launched, "results": found, "groups": grouped}


def train(plan: Planned) -> list[str]:
    return program(["train", str(plan.folder / "experiment.json"), "--run", str(plan.folder), *plan.options])


def here(plans: Sequence[Planned], commands: Sequence[Sequence[str]], jobs: int, gpus: int | None) -> list[int]:
    """Runs the commands, so many at a time. Returns the signals that came, which end those that run."""
    queue = list(zip(plans, commands, strict=True))[::-1]
    running: dict[int, tuple[Planned, subprocess.Popen[bytes], float]] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with local.forwarding(processes) as came:
        try:
            while running or (queue and not came):
                for slot in range(jobs):
                    if slot not in running and queue and not came:
                        plan, command = queue.pop()
                        processes.append(begun(plan, command, local.devices(slot, None, gpus)))
                        running[slot] = plan, processes[-1], time.monotonic()
                        tell(f"{plan.name}: begun")
                for slot, (plan, process, since) in list(running.items()):
                    if process.poll() is not None:
                        (plan.folder / "exit_code").write_text(str(local.code_of(process, came)))
                        said = "" if process.returncode == 0 else f": {last_line(plan.folder / LOG)}"
                        tell(f"{plan.name}: {plan.state} after {time.monotonic() - since:.0f} s{said}")
                        del running[slot]
                time.sleep(local.POLL)
        finally:
            for _, process, _ in running.values():
                local.kill(process)
    return came


def begun(plan: Planned, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The run as a process; its stdout is its result, the rest goes behind its log."""
    (plan.folder / "exit_code").unlink(missing_ok=True)
    with ExitStack() as files:
        result = files.enter_context((plan.folder / "result.json").open("wb"))
        log = files.enter_context((plan.folder / LOG).open("ab"))
        return local.start(command, environment, stdout=result, stderr=log)


def submitted(
    folder: Path, plans: Sequence[Planned], commands: Sequence[Sequence[str]], options: Sweep
) -> dict[str, str]:
    """{"job": the number of the array}, or of a dry run {"script": what a shell would submit}. Raises ValueError if an
    array of this sweep is still in the queue."""
    chosen = replace(options.slurm, name=options.slurm.name or folder.name, logs=folder / "slurm")
    command = slurm.sbatch(chosen, len(commands), options.jobs)
    text = slurm.script(chosen, commands, [plan.folder.absolute() for plan in plans])
    if chosen.dry_run:
        tell(with_input(command, text))
        return {"script": with_input(command, text)}
    waiting = output_of(["squeue", "--me", "--noheader", "--format=%F", f"--name={chosen.name}"])
    if waiting:
        raise ValueError(f"{folder} is in the queue as job {waiting.split()[0]}: wait for it, or scancel it first")
    job = slurm.submit(chosen, command, text)
    tell(f"job {job}: the same command shows the results when it is done")
    return {"job": job}


def last_line(log: Path) -> str:
    """The last thing that a run said."""
    try:
        return next(
            (line.strip() for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), ""
        )
    except OSError:
        return ""


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """One table of all runs, the best first."""
    ranked = sorted(found, key=lambda record: record.get("evaluation", {}).get("loss", float("inf")))
    values = [
        {**record, **{f"validation {name}": x for name, x in record.get("evaluation", {}).items()}} for record in ranked
    ]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("run", overflow="fold", min_width=2 + min(40, max(len(record["name"]) for record in found)))
    table.add_column("state")
    shown = {name: form for name, form in COLUMNS.items() if any(name in record for record in values)}
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for record in values:
        cells = (format(record[name], form) if name in record else "" for name, form in shown.items())
        table.add_row(record["name"], record["state"], *cells)
    console.print(table)


def show_groups(grouped: Sequence[dict[str, Any]], console: Console) -> None:
    """One table of what was tried, the best by the mean of its metric first, where several seeds or the metric of a
    task make it worth it."""
    if all(group["runs"] == 1 and group["metric"] == "loss" for group in grouped):
        return
    table = Table(title="Best evaluations, by seeds", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("experiment", overflow="fold")
    for name in ("runs", "metric", "mean", "deviation", "min", "max"):
        table.add_column(name, justify="right")
    for group in grouped:
        values = group["values"].get(group["metric"], {})
        table.add_row(
            group["name"], str(group["runs"]), group["metric"], *(f"{value:.4f}" for value in values.values())
        )
    console.print(table)
