"""The types that a type checker sees exist and are true."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import kvstore_plugin
from compiled import core

_PACKAGE = Path(kvstore_plugin.__file__).parent


def _annotated_problems(name: str, function) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    problems = [
        f"{name}({one.name})"
        for one in parameters
        if one.annotation is inspect.Parameter.empty and one.name not in ("self", "cls")
    ]
    if inspect.signature(function).return_annotation is inspect.Signature.empty:
        problems.append(f"{name}()")
    return problems


def _public_functions(name: str, value):
    """The function itself; of a class its public methods and properties, also those of our own base classes."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for base in value.__mro__:
            if not base.__module__.startswith("kvstore_plugin"):
                continue
            for member, found in vars(base).items():
                found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                if inspect.isfunction(found) and (not member.startswith("_") or member == "__init__"):
                    yield f"{name}.{member}", found


def test_every_public_function_is_annotated():
    found = [pair for name in kvstore_plugin.__all__ for pair in _public_functions(name, getattr(kvstore_plugin, name))]
    assert len(found) > 80
    assert not [problem for name, function in found for problem in _annotated_problems(name, function)]


def _signatures(documentation: str, name: str) -> list[list[str]]:
    """The names of the parameters in what pybind11 writes at the head of a docstring, for each overload."""
    heads = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", documentation, re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+): ", _without_brackets(head)) for head in heads]


def _without_brackets(text: str) -> str:
    while re.search(r"\[[^\[\]]*\]", text):
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    return text


def _of_module(scope) -> dict[str, list[list[str]] | None]:
    """Each public name of the module or class with its signatures; None if it is not a function."""
    names = {}
    for name, value in vars(scope).items():
        if inspect.isclass(value):
            names.update({f"{name}.{member}": found for member, found in _of_module(value).items()})
            names[name] = None
        elif name == "__init__" and value.__doc__.startswith("__init__("):
            names[name] = _signatures(value.__doc__, name)
        elif not name.startswith("_"):
            names[name] = _signatures(value.__doc__, name) if callable(value) else None
    return names


def _of_stub(body: list[ast.stmt]) -> dict[str, list[list[str]] | None]:
    names = {}
    for item in body:
        if isinstance(item, ast.ClassDef):
            names.update({f"{item.name}.{member}": found for member, found in _of_stub(item.body).items()})
            names[item.name] = None
        elif isinstance(item, ast.AnnAssign):
            names[item.target.id] = None
        elif isinstance(item, ast.FunctionDef):
            is_property = any(getattr(decorator, "id", "") == "property" for decorator in item.decorator_list)
            signature = [argument.arg for argument in item.args.args]
            names[item.name] = None if is_property else [*(names.get(item.name) or []), signature]
    return names


def test_the_stub_of_the_core_has_its_names_and_parameters():
    stub = _of_stub(ast.parse((_PACKAGE / "_core.pyi").read_text()).body)
    assert len(stub) > 100 and stub["lose"] == [["reason", "ranks"]]
    assert stub == _of_module(core)


def test_the_other_name_has_the_types_of_the_package():
    text = (_PACKAGE.parent / "mykv/__init__.py").read_text()
    assert "from kvstore_plugin import *" in text and "__all__ as __all__" in text
    assert (_PACKAGE / "py.typed").exists() and (_PACKAGE.parent / "mykv/py.typed").exists()
