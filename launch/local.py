"""Several processes on this host: a rehearsal of a pod on CPU devices, or one process for each group of GPUs.

    python -m launch.local --processes 2 --cpu-devices 4 -- train gpt:tiny --run runs/two

They find each other by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Their lines come out behind their
number, on stderr; the last line of process 0's stdout, its result, is the launcher's.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from ctx_jax.__main__ import LAUNCHER
from ctx_jax.signals import REQUEUE, exit_code
from launch.command import parsed, program, run

FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""What a launcher passes on, and as what: Ctrl-C, notices of Slurm and others, the end of the terminal."""

POLL = 0.1
"""Seconds between looks at the processes."""


@dataclass(frozen=True)
class Local:
    """Run a command in several processes on this host."""

    processes: int = 2
    """how many"""
    cpu_devices: int | None = None
    """CPU devices of each process, in place of accelerators"""
    gpus: int | None = None
    """GPUs of each process; default: every process sees all of them"""
    restarts: int = 0
    """how often to begin again when the processes were preempted (exit code 75)"""
    grace: float = 60.0
    """seconds that the others get to end in order when one process has ended badly"""
    dry_run: bool = False
    """print what would run"""

    def __post_init__(self) -> None:
        for name in ("processes", "cpu_devices", "gpus"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"--{name.replace('_', '-')} {count}: choose 1 or more")
        for name in ("restarts", "grace"):
            if (number := getattr(self, name)) < 0:
                raise ValueError(f"--{name} {number}: choose 0 or more")
        if self.cpu_devices and self.gpus:
            raise ValueError("--cpu-devices and --gpus: choose one of them")


def environments(options: Local) -> list[dict[str, str]]:
    """What each process finds in its environment beside this one's."""
    shared = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(options.processes)}
    alone = options.processes == 1
    return [
        ({} if alone else {**shared, "JAX_PROCESS_ID": str(number)})
        | devices(number, options.cpu_devices, options.gpus)
        for number in range(options.processes)
    ]


def devices(number: int, cpu_devices: int | None, gpus: int | None) -> dict[str, str]:
    """The variables that give the process of this number its own devices."""
    if cpu_devices:
        kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags = [*kept, f"--xla_force_host_platform_device_count={cpu_devices}"]
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    if gpus:
        first, last = number * gpus, (number + 1) * gpus
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(last)] if visible is None else visible.split(",")
        if len(names) < last:
            raise ValueError(
                f"process {number} is to have {gpus} GPUs, but CUDA_VISIBLE_DEVICES is {visible}: ask for less"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[first:last])}
    return {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(
    command: Sequence[str], environment: dict[str, str], stdout: int | IO[bytes] | None, stderr: int | IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """The command as a process out of reach of the terminal's Ctrl-C, which `forwarding` passes on once; a command of
    ctx_jax is told to stop if this process is killed."""
    return subprocess.Popen(
        command,
        env={**os.environ, LAUNCHER: str(os.getpid()), **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


@contextmanager
def forwarding(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Passes signals on to those of the processes that run; yields the list of the signals that came. What is ignored
    (SIGHUP under nohup) stays so."""
    came: list[int] = []

    def forward(number: int, _: Any) -> None:
        came.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(FORWARDED[signal.Signals(number)])

    descriptor = signal.set_wakeup_fd(-1)  # of a thread that would answer them
    heard = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)


def code_of(process: subprocess.Popen[bytes], came: Sequence[int]) -> int:
    """The exit code of a process that has ended, as a shell's (128 + n: signal n). One that a signal of those passed on
    has ended before it could answer had begun nothing, and is to be begun again."""
    number = -process.returncode
    if number in [int(FORWARDED[signal.Signals(each)]) for each in came]:
        return exit_code(number)
    return 128 + number if number > 0 else -number


def kill(process: subprocess.Popen[bytes]) -> None:
    """At once, with whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@dataclass
class Voice:
    """The output of one process, line by line behind its number."""

    number: int
    last: str = ""
    """of stderr, so far"""

    def complaints(self, stream: IO[bytes]) -> None:
        """Copies stderr."""
        for line in lines(stream):
            self.last = line.strip() or self.last
            self.say(line)

    def results(self, stream: IO[bytes]) -> None:
        """Copies stdout, into which libraries print too: only the last line of process 0 is meant for programs."""
        held = None
        for line in lines(stream):
            if held is not None:
                self.say(held)
            held = line
        if held is not None and self.number == 0:
            print(held, flush=True)
        elif held is not None:
            self.say(held)

    def say(self, line: str) -> None:
        # Nobody may be listening any more, and the process is to go on.
        with suppress(BrokenPipeError):
            if line:
                sys.stderr.write(f"[{self.number}] {line}\n")
                sys.stderr.flush()


def lines(stream: IO[bytes]) -> Iterator[str]:
    with stream:
        for line in stream:
            yield line.decode(errors="replace").rstrip()


def together(command: Sequence[str], environments: Sequence[dict[str, str]], grace: float) -> tuple[int, list[int]]:
    """Runs the command once in each environment until all have ended; the first that ends badly ends the others.

    Returns its exit code (0: none has; 128 + n: signal n), and the signals that were passed on.
    """
    processes: list[subprocess.Popen[bytes]] = []
    voices, copies = [], []
    bad: int | None = None
    with forwarding(processes) as came:
        try:
            for number, environment in enumerate(environments):
                process = start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                processes.append(process)
                voices.append(Voice(number))
                assert process.stdout is not None and process.stderr is not None
                for copy, stream in ((voices[-1].results, process.stdout), (voices[-1].complaints, process.stderr)):
                    copies.append(threading.Thread(target=copy, args=(stream,), daemon=True))
                    copies[-1].start()
            deadline = float("inf")
            while any(process.poll() is None for process in processes):
                if bad is None and (bad := failed(processes)) is not None:
                    deadline = time.monotonic() + grace
                    # Who is preempted has agreed on it with the others, which are saving.
                    for process in processes:
                        if process.poll() is None and not came and processes[bad].returncode != REQUEUE:
                            process.terminate()
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL)
            bad = failed(processes) if bad is None else bad
        finally:
            for process in processes:
                kill(process)
            for copy in copies:
                copy.join()
    if bad is None:
        return 0, came
    code = code_of(processes[bad], came)
    why = "was preempted" if code == REQUEUE else f"ended with exit code {code}, and so all do"
    said = f"; its last line: {voices[bad].last}" if voices[bad].last else ""
    with suppress(BrokenPipeError):
        print(f"process {bad} of {len(processes)} {why}{said}", file=sys.stderr, flush=True)
    return code, came


def failed(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """The number of the first process that has ended badly, if one has."""
    return next((number for number, process in enumerate(processes) if process.poll()), None)


def shown(command: Sequence[str], environments: Sequence[dict[str, str]]) -> str:
    """The same as lines of bash, which end with the same exit code."""
    lines = [
        shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *command]) + ' & pids+=" $! "'
        for environment in environments
    ]
    return "\n".join(["(", *lines, TOGETHER, ")"])


TOGETHER = f"""while [ "$pids" ]; do
  for pid in $pids; do
    kill -0 $pid 2>/dev/null && continue
    pids=${{pids/ $pid /}}
    wait $pid || {{ code=$?; [ $code = {REQUEUE} ] || kill $pids 2>/dev/null; break 2; }}
  done
  sleep {POLL}
done
wait
exit ${{code:-0}}"""
"""What `together` does, in bash."""


def main(arguments: list[str]) -> int:
    options, words = parsed(Local, arguments, "launch.local")
    command = program(words)
    if options.dry_run:
        print(shown(command, environments(options)))
        return 0
    left = options.restarts
    while True:
        code, came = together(command, environments(options), options.grace)
        if code != REQUEUE or came or not left:
            return code
        left -= 1
        print(f"beginning again where they stopped; {left} restarts are left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
