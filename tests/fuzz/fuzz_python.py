"""One of the parsers in Python under atheris, with libFuzzer's arguments: run.py calls it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import atheris

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

with atheris.instrument_imports(
    include=["kvstore_plugin", "mykvrun", "pickle"], exclude=["kvstore_plugin.compat.mxnet"]
):
    import pickle  # noqa: F401

    from kvstore_plugin.collectives import gradient_compression  # noqa: F401
    from kvstore_plugin.sharded_optimizer import safe_unpickler, state_file  # noqa: F401
    from kvstore_plugin.timeline import joined, page, phases, recording, trace  # noqa: F401
    from kvstore_plugin.world import launch_checks, settings  # noqa: F401

    from mykvrun import hosts  # noqa: F401
from parsers import PARSERS  # noqa: E402

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    again = shlex.join([sys.executable, __file__, name])  # to merge, libFuzzer runs its first argument in a shell
    atheris.Setup([again, *arguments], PARSERS[name])
    atheris.Fuzz()
