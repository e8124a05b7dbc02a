"""The folders of csrc/ include each other in one direction only, and so do the files of a folder."""

from __future__ import annotations

import re
from pathlib import Path

_CSRC = Path(__file__).parents[2] / "csrc"
# From the ground up, as in docs/architecture.md: a file includes files of its own folder and of those before it.
_ORDER = [
    "base",
    "kernels",
    "compress",
    "memory",
    "gpu",
    "operations",
    "timeline",
    "table",
    "world",
    "agreement",
    "transport",
    "runtime",
    "mxnet",
    "python",
]
# The module for tests: it may include every folder, and no folder includes it.
_BESIDE = "testing"
# Of it these include nothing of the runtime and above: fuzzers build them without MPI and Python.
_PARSERS = ("testing/parsers.h", "testing/parsers.cpp")
_TOP = "module.cpp"
# Within transport/: each folder, and the folders that it includes. Files beside them choose among the transports.
_TRANSPORTS = {"host": [], "mpi": ["host"], "nccl": []}


def _includes():
    """The file and the included file, relative to csrc/, of every line `#include "..."`."""
    for path in sorted([*_CSRC.rglob("*.h"), *_CSRC.rglob("*.cpp")]):
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            yield str(path.relative_to(_CSRC)), included


def _is_upward(file, included):
    """Whether the first file must not include the second one, by their folders."""
    above, below = file.partition("/")[0], included.partition("/")[0]
    if file in _PARSERS:
        return included not in _PARSERS and below not in _ORDER[: _ORDER.index("runtime")]
    if above == _BESIDE:
        return below not in (*_ORDER, _BESIDE)
    if above == _TOP:
        return below not in _ORDER
    return below not in _ORDER[: _ORDER.index(above) + 1]


def test_every_folder_has_its_place_in_the_order():
    sources = {str(path.relative_to(_CSRC)) for path in _CSRC.rglob("*") if path.suffix in (".h", ".cpp")}
    assert {file.partition("/")[0] for file in sources} == {*_ORDER, _BESIDE, _TOP}
    missing = [line for line in _includes() if line[1] not in sources]
    assert not missing, f"not relative to csrc/: {missing}"


def test_includes_run_down():
    includes = list(_includes())
    assert len(includes) > 300
    upward = [f'{file} includes "{included}"' for file, included in includes if _is_upward(file, included)]
    assert not upward, "\n".join([f"{len(upward)} includes run up:", *upward])


def _circle(below):
    """A circle in a graph (the nodes below each node), or None."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            done.add(node)
            path.append(node)
            for other in sorted(below.get(node, ())):
                if found := visit(other):
                    return found
            path.pop()
        return None

    return next(filter(None, map(visit, sorted(below))), None)


def test_no_circle_of_files():
    """A header and the source file of its name are one file here."""
    below = {}
    for file, included in _includes():
        above, name = file.rpartition(".")[0], included.rpartition(".")[0]
        if above != name:
            below.setdefault(above, set()).add(name)
    circle = _circle(below)
    assert circle is None, " includes ".join(circle)
    runtime = "runtime/runtime"
    assert _circle({**below, "runtime/parts": below["runtime/parts"] | {runtime}})[-1] in (runtime, "runtime/parts")


def test_transports_do_not_include_each_other():
    folder = re.compile(r"transport/(\w+)/")
    for file, included in _includes():
        above, below = folder.match(file), folder.match(included)
        if above and below and above[1] != below[1]:
            assert below[1] in _TRANSPORTS[above[1]], f'{file} includes "{included}"'


def test_architecture_lists_the_folders_in_this_order():
    page = (_CSRC.parent / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| `csrc/([\w.]+)/?` \|", page, re.MULTILINE)
    assert listed == [*_ORDER, _BESIDE, _TOP]
