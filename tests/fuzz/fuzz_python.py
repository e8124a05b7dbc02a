"""One of the parsers in Python under atheris, with libFuzzer's arguments: run.py calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent))

with atheris.instrument_imports(include=["kvstore_plugin", "pickle"], exclude=["kvstore_plugin.compat.mxnet"]):
    import pickle  # noqa: F401

    from kvstore_plugin.collectives import gradient_compression  # noqa: F401
    from kvstore_plugin.sharded_optimizer import safe_unpickler, state_file  # noqa: F401
    from kvstore_plugin.world import launcher, settings  # noqa: F401
from parsers import PARSERS

if __name__ == "__main__":
    parser = PARSERS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, parser)
    atheris.Fuzz()
