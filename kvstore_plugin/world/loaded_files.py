"""The libraries that this process has loaded."""

from __future__ import annotations

import os
from pathlib import Path


def loaded_files(name: str) -> list[str]:
    """Files whose names begin with `name` that this process has mapped; empty if /proc is missing."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if os.path.basename(path).startswith(name))
