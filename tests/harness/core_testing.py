"""Where the extension module for tests lies, mykv_core_testing: beside the tests, since it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

# As build_backend/mykv_compile.py has it: a folder for each environment, since each may have another MPI.
FOLDER = Path(__file__).resolve().parents[2] / "build/testing" / Path(sys.prefix).name
