"""`make faults` plants faults of all kinds at the right places, none in comments, and always the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import coverage, cpp_faults, python_faults
from faults.fault import draw

_ROOT = Path(__file__).parents[2]
_PYTHON = '''"""Words of (1, 2) and == 3."""


def one(a, b=0, *, c: bool = True):
    """Words and words."""
    if a < b and c:
        raise ValueError(f"ä {a + 1} == {b}")
    a.size += other(a, b - 2)
    logger.warning("words", a)
    a.notify()
    return [x for x in a if x]
'''
_CPP = """// if (a == 1) words();
#define ANY (a == 1)
void one(int a) {
  if (a < two(a, b) && ready) {
    say("a == 1, 2", 'x');
    entry.state = State::done;
    ++count_;
  }
  const size_t bytes = count + 4;
}
"""


def _texts(faults, source):
    return {(fault.kind, source[fault.begin : fault.end], fault.text) for fault in faults}


def test_faults_of_a_python_file():
    faults = python_faults.faults_of("a.py", _PYTHON)
    assert _texts(faults, _PYTHON) == {
        ("constant changed", "0", "1"),
        ("constant changed", "True", "False"),
        ("condition negated", "a < b and c", "(not (a < b and c))"),
        ("comparison changed", "<", "<="),
        ("and, or exchanged", "and", "or"),
        ("statement removed", 'raise ValueError(f"ä {a + 1} == {b}")', "pass"),
        ("statement removed", "a.size += other(a, b - 2)", "pass"),
        ("arguments swapped", "a, b - 2", "b - 2, a"),
        ("arithmetic changed", "-", "+"),
        ("constant changed", "2", "3"),
        ("statement removed", "a.notify()", "pass"),
        ("condition negated", "x", "(not (x))"),
    }
    for fault in faults:
        ast.parse(fault.planted(_PYTHON))
        assert _PYTHON.splitlines()[fault.line - 1].strip() in _PYTHON[: fault.end + 60]


def test_faults_of_a_cpp_file():
    assert _texts(cpp_faults.faults_of("a.cpp", _CPP), _CPP) == {
        ("condition negated", "a < two(a, b) && ready", "!(a < two(a, b) && ready)"),
        ("comparison changed", "<", "<="),
        ("and, or exchanged", "&&", "||"),
        ("arguments swapped", "a, b", "b, a"),
        ("statement removed", """say("a == 1, 2", 'x');""", ";"),
        ("statement removed", "entry.state = State::done;", ";"),
        ("statement removed", "++count_;", ";"),
        ("arithmetic changed", "+", "-"),
        ("constant changed", "4", "5"),
    }


@pytest.mark.parametrize("maker, files", [(python_faults, coverage.PYTHON), (cpp_faults, coverage.CPP)])
def test_the_draw_of_this_tree(maker, files):
    """The same each time, of all kinds, at distinct places, in existing files with tests."""
    sources = {file: (_ROOT / file).read_text() for file in files}
    faults = [fault for file in files for fault in maker.faults_of(file, sources[file])]
    drawn = draw(faults, 60, seed=3)
    assert drawn == draw(list(reversed(faults)), 60, seed=3) and len(drawn) == 60
    assert len({fault.kind for fault in drawn}) == 7
    assert len({(fault.file, fault.line) for fault in drawn}) == 60
    assert len({fault.key(sources[fault.file]) for fault in drawn}) == 60
    assert all((_ROOT / test).is_file() for file in files for test in coverage.tests_of(file))


def test_each_file_has_its_tests():
    """Each file of the package and of csrc/ has a line in coverage.py, or a pattern there leaves it out."""
    files = {str(path.relative_to(_ROOT)) for path in _ROOT.glob("kvstore_plugin/**/*.py")}
    files |= {str(path.relative_to(_ROOT)) for path in _ROOT.glob("csrc/**/*.cpp")}
    left_out = {path for path in files for pattern in coverage.NOT_PLANTED if Path(path).match(pattern)}
    assert {*coverage.PYTHON, *coverage.CPP} == files - left_out
    assert all(any(Path(path).match(pattern) for path in files) for pattern in coverage.NOT_PLANTED)
