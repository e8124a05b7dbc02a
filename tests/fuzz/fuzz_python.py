"""One of the parsers in Python under atheris, with libFuzzer's arguments: run.py calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent))

with atheris.instrument_imports(include=["kvstore_plugin", "pickle"], exclude=["kvstore_plugin.compat.mxnet"]):
    import pickle  # noqa: F401

    from kvstore_plugin import gradient_compression, launch, settings, state_file, state_pickle  # noqa: F401
from parsers import PARSERS

if __name__ == "__main__":
    parser = PARSERS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, parser)
    atheris.Fuzz()
