"""TPU pods: a queued resource is created, gets the code, runs the command on all its workers, and is deleted.

    python -m launch.tpu_pod --name gpt2 --zone us-central2-b --accelerator v4-32 --spot -- train gpt:gpt2 --run DIR

What every worker prints comes out here. A pod that is taken back (exit code 75, or a queued resource that is no longer
active) is deleted and created again, and the same command goes on where the run stopped: DIR must be on storage that
outlives the machines, such as a bucket that `--setup` mounts.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctx_jax.signals import REQUEUE
from launch.command import output_of, parsed, program, run, tell
from launch.local import code_of, forwarding, start

FOLDER = "ctx_jax"
"""Where the code is on a worker, in its home folder."""

LISTED = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", f"--exclude={FOLDER}.tar.gz"]
"""What is copied: all of the current folder that git knows, or would know, but for the archive, which the lines of a
dry run make there."""

FAILED = "FAILED"
TAKEN = ("SUSPENDING", "SUSPENDED", "DELETING")
"""States of a queued resource that does not become active again: it cannot be had; it was taken back."""

CONNECTION = 255
"""ssh's own exit code."""


@dataclass(frozen=True)
class TpuPod:
    """Run a command on all workers of a TPU pod that is made for it."""

    name: str
    """of the queued resource and its nodes"""
    zone: str
    accelerator: str
    """type and size of a slice, as v4-32 or v5litepod-16"""
    runtime: str = "tpu-ubuntu2204-base"
    """the workers' software: v2-alpha-tpuv5-lite for v5e, v2-alpha-tpuv6e for v6e"""
    slices: int = 1
    """pods that work together over the data center's network"""
    project: str | None = None
    """default: gcloud's own"""
    spot: bool = False
    """cheaper, and may be taken back at any time"""
    retries: int = 100
    """how often a pod that was taken back is created again"""
    setup: str = (
        "pip install --quiet --user uv && ~/.local/bin/uv venv --quiet --clear --python 3.12 && "
        '~/.local/bin/uv pip install --quiet -e . "jax[tpu]"'
    )
    """what each worker runs first, in bash, in the folder of the code"""
    python: str = ".venv/bin/python"
    """the interpreter that `setup` leaves there"""
    keep: bool = False
    """leave the pod when the command has ended"""
    poll: float = 30.0
    """seconds between looks at a pod that is waited for"""
    dry_run: bool = False
    """print what would run"""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", self.name):
            raise ValueError(f"--name {self.name!r}: choose lower-case letters, digits and dashes, 63 at most")
        for name, least in (("slices", 1), ("retries", 0), ("poll", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"--{name} {number}: choose {least} or more")

    def gcloud(self, action: str, *arguments: str) -> list[str]:
        place = [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else []), "--quiet"]
        return ["gcloud", "compute", "tpus", "queued-resources", action, *arguments, *place]

    def create(self) -> list[str]:
        nodes = [f"--node-id={self.name}"] if self.slices == 1 else [f"--node-count={self.slices}"]
        kind = [f"--accelerator-type={self.accelerator}", f"--runtime-version={self.runtime}"]
        return self.gcloud("create", self.name, *nodes, *kind, *(["--spot"] if self.spot else []))

    def state(self) -> list[str]:
        return self.gcloud("describe", self.name, "--format=value(state.state)")

    def delete(self) -> list[str]:
        return self.gcloud("delete", self.name, "--force")

    def copy(self, archive: Path) -> list[str]:
        return self.gcloud("scp", str(archive), f"{self.name}:{FOLDER}.tar.gz", *self.everywhere())

    def on_workers(self, line: str) -> list[str]:
        """A line of bash on every worker at once."""
        return self.gcloud("ssh", self.name, *self.everywhere(), f"--command={line}")

    def everywhere(self) -> list[str]:
        return ["--node=all", "--worker=all", "--batch-size=all"]

    def prepare(self) -> list[str]:
        unpack = f"rm -rf {FOLDER} && mkdir {FOLDER} && tar -xzf {FOLDER}.tar.gz -C {FOLDER} && cd {FOLDER}"
        return self.on_workers(f"{unpack} && {self.setup}")

    def work(self, words: Sequence[str]) -> list[str]:
        return self.on_workers(f"cd {FOLDER} && exec {shlex.join(program(words, self.python))}")


def files() -> list[str]:
    """The names of what is copied; git also knows what has been deleted."""
    return sorted(name for name in set(output_of(LISTED).split("\0")) if name and Path(name).is_file())


def pack(archive: Path) -> list[str]:
    return ["tar", "-czf", str(archive), "--null", "--files-from=-"]


@contextlib.contextmanager
def existing(pod: TpuPod) -> Iterator[None]:
    """The queued resource, for as long as the block lasts."""
    output_of(pod.create())
    try:
        yield
    finally:
        if pod.keep:
            tell(f"{pod.name} is left; {shlex.join(pod.delete())} deletes it")
        else:
            tell(f"deleting {pod.name}")
            output_of(pod.delete())


class Taken(Exception):
    """The pod was taken back."""


def wait(pod: TpuPod) -> None:
    """Until the pod is active. Raises ChildProcessError if it cannot be had, Taken."""
    before = ""
    while (state := output_of(pod.state())) != "ACTIVE":
        if state == FAILED:
            raise ChildProcessError(f"{pod.name} is {state}: look at it with {shlex.join(pod.state()[:-2])}")
        if state in TAKEN:
            raise Taken
        if state != before:
            tell(f"{pod.name}: {state or 'not there yet'}")
        before = state
        time.sleep(pod.poll)


@contextlib.contextmanager
def unless_taken(pod: TpuPod) -> Iterator[None]:
    """Raises Taken for what fails in this block because the pod is not there any more."""
    try:
        yield
    except ChildProcessError:
        if output_of(pod.state()) != "ACTIVE":
            raise Taken from None
        raise


def attempt(pod: TpuPod, words: Sequence[str]) -> int:
    """One pod's life. Returns the exit code. Raises Taken, ChildProcessError."""
    with existing(pod), tempfile.TemporaryDirectory() as folder:
        wait(pod)
        archive = Path(folder) / f"{FOLDER}.tar.gz"
        output_of(pack(archive), "\0".join(files()))
        with unless_taken(pod):
            for step, command in (("copying the code", pod.copy(archive)), ("setting up", pod.prepare())):
                tell(step)
                output_of(command)
        tell("running")
        processes: list[subprocess.Popen[bytes]] = []
        with forwarding(processes) as came:
            processes.append(start(pod.work(words), {}, None, None))
            processes[0].wait()
        code = code_of(processes[0], came)
        if not came and (code == REQUEUE or (code != 0 and output_of(pod.state()) != "ACTIVE")):
            raise Taken
        if code == CONNECTION:
            tell(f"the connection to {pod.name} was lost")
        return code


def shown(pod: TpuPod, words: Sequence[str]) -> str:
    """What runs, as lines of bash, which end with the same exit code."""
    archive = Path(f"{FOLDER}.tar.gz")
    steps = [
        "(",
        "set -e",
        shlex.join(pod.create()),
        *([] if pod.keep else [f"trap {shlex.quote(shlex.join(pod.delete()))} EXIT"]),
        f'until [ "$({shlex.join(pod.state())})" = ACTIVE ]; do sleep {pod.poll:g}; done',
        f"{shlex.join(LISTED)} | {shlex.join(pack(archive))}",
        *(shlex.join(command) for command in (pod.copy(archive), pod.prepare(), pod.work(words))),
        ")",
    ]
    return "\n".join(steps)


def main(arguments: list[str]) -> int:
    pod, words = parsed(TpuPod, arguments, "launch.tpu_pod")
    if pod.dry_run:
        print(shown(pod, words))
        return 0
    for left in reversed(range(pod.retries + 1)):
        with contextlib.suppress(Taken):
            return attempt(pod, words)
        if left:
            tell(f"{pod.name} was taken back: a new one goes on; {left - 1} more may follow")
    return REQUEUE


if __name__ == "__main__":
    run(main)
