"""Runs the clients, each in its environment, and prints a table of what came out: ``python run.py gluonts sockeye``.

`make test-clients` makes the environments, .venv-client-NAME, and calls this. What the cases leave is in build/clients.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_TIMEOUT = 3600.0  # seconds for one client


def _outcomes(name: str) -> list[dict]:
    """What came out of a client's cases."""
    programs = _ROOT / f".venv-client-{name}" / "bin"
    directory = _ROOT / "build" / "clients" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    try:
        subprocess.run(
            [programs / "python", _HERE / f"{name}_client.py", directory], env=env, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [{"case": "all", "passed": False, "text": str(error), "seconds": 0.0}]
    return json.loads((directory / "outcomes.json").read_text())


def _row(name: str, outcome: dict) -> str:
    if "difference" in outcome:
        losses = f"{outcome['last_of_one']:.6f} | {outcome['last']:.6f} | {outcome['difference']:.1e}"
        cells = f"{outcome['steps']} | {outcome['first']:.6f} | {losses}"
    else:
        cells = " | | | | "
    text = "FAILED" if not outcome["passed"] else outcome["text"] or "passed"
    return f"| {name} | {outcome['case']} | {cells} | {text} | {outcome['seconds']:.0f} s |"


def main(names: list[str]) -> int:
    """Run the clients, and return the exit status: 1 where a case has failed."""
    found = {name: _outcomes(name) for name in names}
    print("\n| program | case | losses | first | last, one process | last, two workers | largest difference | | time |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, outcomes in found.items():
        for outcome in outcomes:
            print(_row(name, outcome))
    failed = [(name, outcome) for name, outcomes in found.items() for outcome in outcomes if not outcome["passed"]]
    for name, outcome in failed:
        print(f"\nFAILED {name}, {outcome['case']}: {outcome['text']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
