"""What every test shares: CPU devices, and a compilation that is never silently wide in rank."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
