"""Installs the harness for tests of several ranks (tests/harness)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `harness`: pytest's import mode here leaves sys.path alone

from harness import pytest_configure  # noqa: F401
