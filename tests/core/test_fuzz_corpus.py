"""The corpus of fuzzing (tests/fuzz), as input of the ordinary build of every parser."""

from __future__ import annotations

import mykv_core_testing
import pytest
from fuzz import corpus
from fuzz.parsers import PARSERS

_PARSERS = {name: lambda data, name=name: mykv_core_testing.parse(name, data) for name in mykv_core_testing.parsers()}
_PARSERS.update(PARSERS)


def test_every_parser_has_a_corpus():
    assert sorted(_PARSERS) == corpus.parsers()
    inputs = {parser: len(corpus.read(parser)) for parser in _PARSERS}
    assert all(inputs.values()) and sum(inputs.values()) >= 1035, f"a reader of a diff sees no lost input: {inputs}"


@pytest.mark.parametrize("parser", _PARSERS)
def test_the_same_inputs_make_the_same_zip(parser):
    assert corpus.packed(corpus.read(parser)) == (corpus.FOLDER / f"{parser}.zip").read_bytes()


def test_what_a_fuzzer_found_is_added_to_the_corpus(tmp_path, monkeypatch):
    before = corpus.read("launcher")
    monkeypatch.setattr(corpus, "FOLDER", tmp_path / "corpus")
    corpus.FOLDER.mkdir()
    assert corpus.add("launcher", before.values()) == len(before)
    found = tmp_path / "found"
    found.mkdir()
    (found / "known").write_bytes(next(iter(before.values())))
    (found / "new").write_bytes(b"new")
    (tmp_path / "crash").write_bytes(b"crash")
    for _ in range(2):
        corpus.main(["launcher", str(found), str(tmp_path / "crash")])
        assert sorted(corpus.read("launcher").values()) == sorted([*before.values(), b"new", b"crash"])


@pytest.mark.parametrize("parser", _PARSERS)
def test_parser_bears_its_corpus(parser):
    for name, data in corpus.read(parser).items():
        try:
            _PARSERS[parser](data)
        except Exception as error:
            raise AssertionError(f"{parser} does not bear {name} of its corpus") from error


@pytest.mark.parametrize("parser", _PARSERS)
def test_parser_bears_damaged_input(parser):
    """Each input cut off and with a changed byte here and there."""
    for data in list(corpus.read(parser).values())[:20]:
        for at in range(0, len(data), max(1, len(data) // 12)):
            _PARSERS[parser](data[:at])
            _PARSERS[parser](data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
