"""``python -m faults --python 150 --cpp 60 --seed 1 --results FILE``: plant faults, and say which the tests noticed.

A run that was ended goes on where it was, when the results file is given again and the code is the same.
``--list`` shows the draw, ``--table`` what the results file has; ``--only KEY`` tries a fault again, and the file
stays as it is.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import sys
from pathlib import Path

from . import cpp_faults, python_faults
from .coverage import CPP, PYTHON
from .fault import Fault, draw
from .trial import Tree

_ROOT = Path(__file__).resolve().parents[2]
_SPARE = 3  # times as many C++ faults are drawn, since some do not compile


def main() -> int:
    """Do what the command line says; 1 where fewer than the wanted share was noticed."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--python", type=int, default=150, help="how many in Python")
    parser.add_argument("--cpp", type=int, default=60, help="how many in C++")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--least", type=float, default=0.9, help="share that has to be noticed")
    parser.add_argument("--only", help="key of a fault, as in the results file")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        return _table(_read(given.results), given.least)
    sources = {file: (_ROOT / file).read_text() for file in [*PYTHON, *CPP]}
    drawn = {"py": _drawn(PYTHON, python_faults, sources, given.python, given.seed)}
    drawn["cpp"] = _drawn(CPP, cpp_faults, sources, _SPARE * given.cpp, given.seed)
    if given.list or given.only:
        drawn = {
            kind: [one for one in faults if given.only in (None, one.key(sources[one.file]))]
            for kind, faults in drawn.items()
        }
    if given.list:
        for fault in [*drawn["py"], *drawn["cpp"]]:
            print(_line(fault, sources[fault.file]))
        return 0
    done = [] if given.only else _read(given.results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy of the tree goes
    with Tree(_ROOT) as tree:
        for kind, most in (("py", given.python), ("cpp", given.cpp)):
            _try_all(tree, drawn[kind], most, done, None if given.only else given.results)
    return _table(done, given.least)


def _drawn(files: dict, maker, sources: dict[str, str], count: int, seed: int) -> list[Fault]:
    return draw([fault for file in files for fault in maker.faults_of(file, sources[file])], count, seed)


def _line(fault: Fault, source: str) -> str:
    return f"{fault.key(source)} {fault.file}:{fault.line} {fault.kind} {fault.described(source)}"


def _try_all(tree: Tree, faults: list[Fault], most: int, done: list[dict], results: Path | None) -> None:
    """Try faults in the order of the draw until as many have been planted as asked for; adds to `done`."""
    known = {one["key"]: one for one in done}
    planted = 0
    for fault in faults:
        if planted == most:
            return
        source = tree.source(fault.file)
        key = fault.key(source)
        if key not in known:
            outcome = tree.try_one(fault)
            known[key] = {
                "key": key,
                "file": fault.file,
                "line": fault.line,
                "kind": fault.kind,
                "change": fault.described(source),
                **outcome._asdict(),
            }
            done.append(known[key])
            print(f"{outcome.what} {_line(fault, source)} {outcome.by} {outcome.seconds:.0f} s", flush=True)
            if results:
                with results.open("a") as file:
                    file.write(json.dumps(known[key]) + "\n")
        planted += known[key]["what"] != "not built"


def _read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _table(done: list[dict], least: float) -> int:
    """Print what became of the faults of each file, and each that was not noticed."""
    counts: dict[str, collections.Counter] = {}
    for one in done:
        counts.setdefault(one["file"], collections.Counter())[one["what"]] += 1
    print("\n| file | planted | noticed | by a time limit | not noticed |\n| --- | --- | --- | --- | --- |")
    total: collections.Counter = collections.Counter()
    for file, count in [*sorted(counts.items()), ("all", total)]:
        if file != "all":
            total.update(count)
        planted = sum(number for what, number in count.items() if what != "not built")
        print(f"| {file} | {planted} | {count['noticed']} | {count['hang']} | {count['not noticed']} |")
    for one in done:
        if one["what"] == "not noticed":
            print(f"{one['key']} {one['file']}:{one['line']} {one['kind']} {one['change']}")
    tried = total["noticed"] + total["hang"] + total["not noticed"]
    return 0 if tried and (total["noticed"] + total["hang"]) / tried >= least else 1


if __name__ == "__main__":
    sys.exit(main())
