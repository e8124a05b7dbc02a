"""The possible faults of a C++ file: from its text as clang-format writes it. What does not compile is no fault."""

from __future__ import annotations

import re
from typing import Callable, Iterator

from .fault import Fault

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_ARGUMENT = r"[\w.>\-:*&\[\]]+(?:\([\w.>\-:]*\))?"


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults of a file."""
    code = _without_words(source)
    found: list[Fault] = []

    def add(kind: str, begin: int, end: int, text: str) -> None:
        found.append(Fault(file, code.count("\n", 0, begin) + 1, kind, begin, end, text))

    for kind, pattern, changed in _PATTERNS:
        for match in re.finditer(pattern, code, re.MULTILINE):
            begin, end = match.span("it")
            text = changed(match)
            if not _is_of_preprocessor(code, begin):
                add(kind, begin, end, source[begin:end] if text is None else text)
    for begin, end in _conditions(code):
        add("condition negated", begin, end, f"!({source[begin:end]})")
    return [fault for fault in found if fault.text != source[fault.begin : fault.end]]


_PATTERNS: list[tuple[str, str, Callable[[re.Match], str]]] = [
    ("comparison changed", r" (?P<it><=|>=|==|!=|<|>) (?!\{)", lambda match: _COMPARISONS[match["it"]]),
    ("and, or exchanged", r" (?P<it>&&|\|\|) ", lambda match: "||" if match["it"] == "&&" else "&&"),
    ("arithmetic changed", r"(?<=[\w\])]) (?P<it>[+\-]) (?=[\w(])", lambda match: "-" if match["it"] == "+" else "+"),
    ("constant changed", r"(?<![\w.{])(?P<it>\d+)(?![\w.])", lambda match: str(int(match["it"]) + 1)),
    ("constant changed", r"\b(?P<it>true|false)\b", lambda match: "false" if match["it"] == "true" else "true"),
    # Whole lines only, and no definitions: a call begins with a name and a bracket, a dot or an arrow.
    ("statement removed", r"^ +(?P<it>[\w:]+(?:(?:\.|->)\w+|\[\w+\])*\([^;{}\n]*\);)$", lambda match: ";"),
    ("statement removed", r"^ +(?P<it>[\w.\[\]>\-]+_?(?:\.|->|_ )\S* ?[+\-|]?= [^;{}\n]*;)$", lambda match: ";"),
    ("statement removed", r"^ +(?P<it>(?:\+\+|--)[\w.>\-]+;)$", lambda match: ";"),
    (
        "arguments swapped",
        rf"(?<=\w)\((?P<it>(?P<first>{_ARGUMENT}), (?P<second>{_ARGUMENT}))(?=[,)])",
        lambda match: f"{match['second']}, {match['first']}",
    ),
]


def _without_words(source: str) -> str:
    """The text with spaces in place of comments and of what stands in quotes; every place stays where it is."""
    words = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    return re.sub(words, lambda match: re.sub(r"[^\n]", " ", match.group()), source, flags=re.DOTALL)


def _is_of_preprocessor(code: str, place: int) -> bool:
    return code[code.rfind("\n", 0, place) + 1 : place].lstrip().startswith("#")


def _conditions(code: str) -> Iterator[tuple[int, int]]:
    """Where the conditions of if and while stand, without those that declare something."""
    for match in re.finditer(r"\b(?:if|while) \(", code):
        depth, end = 1, match.end()
        while depth and end < len(code):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        text = code[match.end() : end - 1]
        if ";" not in text and not re.search(r"[^=!<>]=[^=]", text):
            yield match.end(), end - 1
