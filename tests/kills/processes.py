"""Runs as their users start them: real processes, on one or several hosts, that can be killed at any moment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(cache: Path, devices: int = 1) -> dict[str, str]:
    """Of a process with so many CPU devices; equal programs are compiled once."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def start(arguments: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`python ARGUMENTS`, its output in a file."""
    with log.open("wb") as stream:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)


def start_hosts(
    arguments: Sequence[str], environment: dict[str, str], processes: int, logs: Path
) -> list[subprocess.Popen[bytes]]:
    """The same in several processes that make one run."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)} if processes > 1 else {}
    return [
        start(arguments, {**environment, **shared, "JAX_PROCESS_ID": str(number)}, logs / f"process_{number}.log")
        for number in range(processes)
    ]
