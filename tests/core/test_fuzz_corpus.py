"""The corpus of fuzzing (tests/fuzz), as input of the ordinary build of every parser."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess

import pytest
from compiled import testing
from fuzz import corpus, run
from fuzz.parsers import PARSERS

_PARSERS = {name: lambda data, name=name: testing.parse(name, data) for name in testing.parsers()}
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


@pytest.mark.long
def test_fuzzers_are_linked_from_the_listed_sources(tmp_path):
    """With the compiler of the core: to link a fuzzer itself takes clang."""
    gxx = os.environ.get("CXX", "g++")
    library = run.compile_core(tmp_path, gxx, ["-O0"])
    command = [gxx, "-std=c++17", "-fPIC", "-shared", "-Wl,--no-undefined", "-pthread", '-DMYKV_PARSER="news"']
    command += [f"-I{run.ROOT}/csrc", str(run.HERE / "fuzz.cpp"), str(library), "-o", str(tmp_path / "parsers.so")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_what_atheris_finds_is_kept(tmp_path, monkeypatch):
    """libFuzzer merges in a process of its own, and says nothing if it cannot start that."""
    first = next(iter(corpus.read("hostfile").values()))
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    corpus.add("hostfile", [first])
    (command,) = run.commands(tmp_path, ["hostfile"]).values()
    chosen = argparse.Namespace(work=tmp_path, seconds=10, runs=2000, keep=True)
    tried, failure = run.fuzz("hostfile", command, chosen)
    assert tried and not failure
    assert len(corpus.read("hostfile")) > 1
