"""Where compiled programs are kept."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax


def keep_compiled() -> None:
    """What XLA compiles is kept from command to command, in $JAX_COMPILATION_CACHE_DIR or the user's cache: the second
    start is quick, and on a GPU a run goes on with the very kernels that were chosen when it began.

    Each kind of processor has its own: JAX does not tell programs for one CPU from those for another, which may crash
    where a home folder is shared.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "ctx_jax" / "compiled" / processor()))


def processor() -> str:
    """A name for what this machine's CPU can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else [platform.processor()]
    abilities = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}) or lines[:1]
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(abilities).encode()).hexdigest()[:8]}"
