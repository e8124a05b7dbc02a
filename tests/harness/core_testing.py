"""Finds the extension module for tests, mykv_core_testing, which is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

# As in build_backend/mykv_build.py: a folder for each environment, since each may have another MPI.
FOLDER = Path(__file__).resolve().parents[2] / "build/testing" / Path(sys.prefix).name
