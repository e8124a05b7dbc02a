"""The API reference lists what the package makes public, and finds a docstring for each of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import kvstore_plugin
import pytest

_API = Path(__file__).parents[1] / "docs" / "api.md"
_VALUES = {name: getattr(kvstore_plugin, name) for name in sorted(kvstore_plugin.__all__)}


def test_api_reference_lists_every_public_name_once():
    listed = re.findall(r"^::: kvstore_plugin\.(\w+)$", _API.read_text(), re.MULTILINE)
    assert sorted(listed) == list(_VALUES)


@pytest.mark.parametrize("name", [name for name, value in _VALUES.items() if inspect.isroutine(value)])
def test_public_functions_have_docstrings(name):
    assert inspect.getdoc(_VALUES[name]), name


@pytest.mark.parametrize("name", [name for name, value in _VALUES.items() if inspect.isclass(value)])
def test_public_classes_and_their_methods_have_docstrings(name):
    assert _VALUES[name].__doc__, name
    for key, member in vars(_VALUES[name]).items():
        if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{key}"
