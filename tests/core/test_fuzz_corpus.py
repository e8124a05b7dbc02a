"""The corpus of fuzzing (tests/fuzz), as input of the ordinary build of every parser."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import mykv_core_testing
import pytest

_FUZZ = Path(__file__).parents[1] / "fuzz"
_spec = importlib.util.spec_from_file_location("fuzz_parsers", _FUZZ / "parsers.py")
_in_python = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_in_python)

_PARSERS = {name: lambda data, name=name: mykv_core_testing.parse(name, data) for name in mykv_core_testing.parsers()}
_PARSERS.update(_in_python.PARSERS)


def _inputs(parser: str) -> list[Path]:
    return sorted((_FUZZ / "corpus" / parser).iterdir())


def test_every_parser_has_a_corpus():
    assert sorted(_PARSERS) == sorted(path.name for path in (_FUZZ / "corpus").iterdir())
    assert all(_inputs(parser) for parser in _PARSERS)


@pytest.mark.parametrize("parser", _PARSERS)
def test_parser_bears_its_corpus(parser):
    for path in _inputs(parser):
        try:
            _PARSERS[parser](path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{parser} does not bear {path}") from error


@pytest.mark.parametrize("parser", _PARSERS)
def test_parser_bears_damaged_input(parser):
    """Each input cut off and with a changed byte here and there."""
    for path in _inputs(parser)[:20]:
        data = path.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 12)):
            _PARSERS[parser](data[:at])
            _PARSERS[parser](data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
