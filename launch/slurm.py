"""Slurm: a job that saves before its time is up or it is preempted, and goes back into the queue until it is done.

    python -m launch.slurm --nodes 2 --gpus 8 --time 24:00:00 -- train gpt:gpt2 --run runs/gpt2

Slurm sends SIGUSR1 `--signal` seconds before the limit, and SIGTERM when it preempts; the run saves, exits with 75, and
the script requeues the job. The code and the run folder must be on a file system that the nodes share.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctx_jax.signals import REQUEUE
from launch.command import output_of, parsed, program, run, with_input


@dataclass(frozen=True)
class Slurm:
    """Submit a command as a job."""

    name: str = ""
    """the job's name; default: ctx_jax, or the sweep's"""
    nodes: int = 1
    """machines"""
    tasks: int | None = None
    """processes on each node; default: one for each GPU, or one"""
    gpus: int = 0
    """GPUs of each node"""
    cpus: int | None = None
    """cores of each process"""
    memory: str | None = None
    """of each node, as Slurm writes it: 64G"""
    time: str | None = None
    """limit, as Slurm writes it: 30 (minutes), 24:00:00, 2-00:00:00"""
    partition: str | None = None
    account: str | None = None
    signal: int = 120
    """seconds before the limit at which the run is told to save"""
    requeues: int = 100
    """how often the job may go back into the queue"""
    setup: str = ""
    """lines of bash before the command: modules, variables"""
    logs: Path = Path("runs/slurm")
    """folder of what the job prints"""
    options: tuple[str, ...] = ()
    """more options of sbatch without their dashes: exclusive mail-type=END"""
    dry_run: bool = False
    """print what would be submitted"""

    def __post_init__(self) -> None:
        if "/" in self.name or "\n" in self.name:
            raise ValueError(f"--name {self.name!r} cannot name a log file: choose one without slashes")
        for name, least in (("nodes", 1), ("tasks", 1), ("gpus", 0), ("cpus", 1), ("signal", 0), ("requeues", 0)):
            if (count := getattr(self, name)) is not None and count < least:
                raise ValueError(f"--{name} {count}: choose {least} or more")


def sbatch(options: Slurm, jobs: int, at_once: int | None = None) -> list[str]:
    """The command that reads the script; more than one job is an array, of which `at_once` run at a time."""
    chosen: dict[str, object] = {
        "job-name": options.name or "ctx_jax",
        "nodes": options.nodes,
        "ntasks-per-node": options.tasks or max(options.gpus, 1),
        "gpus-per-node": options.gpus or None,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"USR1@{options.signal}" if options.time else None,
        "array": f"0-{jobs - 1}" + (f"%{at_once}" if at_once else "") if jobs > 1 else None,
        "chdir": Path.cwd(),
        "output": f"{str(options.logs.absolute()).replace('%', '%%')}/%x-{'%A_%a' if jobs > 1 else '%j'}.log",
        "open-mode": "append",
    }
    flags = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    return ["sbatch", "--parsable", "--requeue", *flags, *(f"--{option}" for option in options.options)]


def script(options: Slurm, commands: Sequence[Sequence[str]], records: Sequence[Path] = ()) -> str:
    """The batch script of these commands, one job of an array each.

    Args:
        records: for each command the folder that is told its exit code (`exit_code`) and stdout (`result.json`).
    """
    folders = [f"folder={shlex.quote(str(folder))}; " for folder in records] or [""] * len(commands)
    cases = [
        f"{number}) {folder}set -- {shlex.join(command)} ;;"
        for number, (command, folder) in enumerate(zip(commands, folders, strict=True))
    ]
    record = ('rm -f "$folder/exit_code"', ' > "$folder/result.json"', 'echo $code > "$folder/exit_code"')
    before, into, after = record if records else ("", "", "")
    lines = [
        "#!/bin/bash",
        "# The tasks are told to end, and this script waits for them.",
        "trap : TERM USR1",
        options.setup,
        "case ${SLURM_ARRAY_TASK_ID:-0} in",
        *cases,
        "esac",
        before,
        "# When one task has ended, the others get a minute.",
        f'srun --kill-on-bad-exit=0 --wait=60 "$@"{into}',
        "code=$?",
        after,
        "# 138 and 143: the signal came before the command could answer it.",
        f"if [[ $code =~ ^({REQUEUE}|138|143)$ ]] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {options.requeues} ]; then",
        "  # A job that was cancelled does not run any more, and stays cancelled.",
        "  case $(squeue --noheader --format=%T/%r --jobs=$SLURM_JOB_ID) in",
        "    RUNNING/* | */TimeLimit) scontrol requeue $SLURM_JOB_ID ;;",
        "  esac",
        "fi",
        "exit $code",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def submit(options: Slurm, command: Sequence[str], text: str) -> str:
    """Submits and returns the number of the job. Raises ChildProcessError with Slurm's complaint."""
    options.logs.mkdir(parents=True, exist_ok=True)
    return output_of(command, text).partition(";")[0]


def main(arguments: list[str]) -> int:
    options, words = parsed(Slurm, arguments, "launch.slurm")
    command, text = sbatch(options, jobs=1), script(options, [program(words)])
    print(with_input(command, text) if options.dry_run else submit(options, command, text))
    return 0


if __name__ == "__main__":
    run(main)
