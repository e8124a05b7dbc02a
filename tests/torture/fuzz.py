"""Target: every parser of external input, under the fuzzers of tests/fuzz, like `make fuzz`.

Each input counts as one try, and each crashing parser as a failure; its input stays in build/fuzz. The core's parsers
need clang, those in Python atheris; missing tools are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import time

from fuzz import run as fuzzers

from .tally import Budget, Tally

_WORK = fuzzers.ROOT / "build/fuzz"


def run(budget: Budget, only: list[str] | None = None) -> Tally:
    """Each parser for the same share of the time, or some of them by their names."""
    tally = Tally()
    _WORK.mkdir(parents=True, exist_ok=True)
    core, in_python = ([name for name in names if not only or name in only] for names in fuzzers.names())
    commands: dict[str, list[str]] = {}
    missing = []
    if importlib.util.find_spec("atheris") is None:
        missing.append(f"not tried, since atheris is not installed: {', '.join(in_python)}")
    elif in_python:
        commands.update(fuzzers.commands(_WORK, in_python))
    try:
        commands.update(fuzzers.commands(_WORK, core) if core else {})
    except SystemExit as error:  # no clang
        missing.append(f"not tried: {', '.join(core)}; {error}")
    for number, (name, command) in enumerate(sorted(commands.items())):
        seconds = max(budget.left() / (len(commands) - number), 1.0)
        chosen = argparse.Namespace(work=_WORK, seconds=seconds, runs=budget.most or -1, keep=False)
        begin = time.monotonic()
        inputs, failure = fuzzers.fuzz(name, command, chosen)
        tally.tried += inputs
        tally.notes.append(f"{name}: {inputs} inputs in {time.monotonic() - begin:.0f} s")
        if failure:
            tally.failures.append(f"parser {name}, its input is in {_WORK}/crashes-{name}\n{failure}")
        elif not inputs:
            tally.failures.append(f"parser {name}: the fuzzer has tried no input")
    tally.notes += missing
    tally.is_missing = not commands
    return tally
