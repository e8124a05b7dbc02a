"""Pages, public docstrings and code avoid patterns that mark translated English (translated_patterns.txt)."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from pathlib import Path

import kvstore_plugin
import pytest

_ROOT = Path(__file__).parents[2]
_FILE = Path(__file__).with_name("translated_patterns.txt")
_PAGES = [_ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")]
_PAGES += sorted((_ROOT / "docs").glob("*.md"))


def _sections() -> dict[str, list[str]]:
    """The lines of each section of the file, without comments."""
    found: dict[str, list[str]] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r"\[([\w ]+)\]", line)
        if heading:
            lines = found.setdefault(heading[1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


_SECTIONS = _sections()
_PATTERNS = [line.split(" => ") for line in _SECTIONS["patterns"]]
_ALLOWED = [line.split(" => ") for line in _SECTIONS["allowed"]]
_AT_MOST = {folder: int(number) for folder, number in (line.split() for line in _SECTIONS["at most"])}


def _matches(text: str) -> list[tuple[str, str]]:
    """Each match with some words around it, and the replacement."""
    text = " ".join(text.split())
    found = []
    for pattern, instead in _PATTERNS:
        for match in re.finditer(pattern, text, re.IGNORECASE):
            found.append((text[max(match.start() - 40, 0) : match.end() + 40], instead))
    return found


def _wrong(name: str, text: str) -> list[str]:
    parts = [part for file, part, _ in _ALLOWED if file == name]
    return [f"{name}: ...{shown}...  Write: {i}" for shown, i in _matches(text) if not any(p in shown for p in parts)]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    # Messages are checked in the code.
    text = re.sub(r"\*\*`.*?`\*\*", "", text, flags=re.DOTALL) if page.name == "troubleshooting.md" else text
    wrong = _wrong(page.name, text)
    assert not wrong, "\n".join(wrong)


def _public_docstrings() -> dict[str, str]:
    found = {}
    for name in kvstore_plugin.__all__:
        value = getattr(kvstore_plugin, name)
        members = vars(value).items() if inspect.isclass(value) else []
        objects = {name: value, **{f"{name}.{key}": member for key, member in members if not key.startswith("_")}}
        for where, one in objects.items():
            if inspect.isroutine(one) or inspect.isclass(one) or isinstance(one, property):
                found[where] = inspect.getdoc(one) or ""
    return found


def test_public_docstrings_are_plain():
    wrong = [line for name, text in _public_docstrings().items() for line in _wrong(name, text)]
    assert not wrong, "\n".join(wrong)


def _texts(path: Path) -> str:
    """Comments and texts of a file of Python or C++."""
    code = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
        return "\n".join(token.string.lstrip("# ") for token in tokens if token.type in kinds)
    code = re.sub(r"^#include.*$", "", code, flags=re.MULTILINE)
    return "\n".join(re.findall(r"(?<!:)//(.*)$", code, re.MULTILINE) + re.findall(r'"((?:[^"\\\n]|\\.)*)"', code))


def _counts() -> dict[str, int]:
    """The number of matches in the code, by folder."""
    counts: dict[str, int] = {}
    for top in ("kvstore_plugin", "mykvrun", "build_backend", "csrc", "benchmarks", "examples"):
        for path in sorted((_ROOT / top).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and path.is_file():
                folder = "/".join(path.relative_to(_ROOT).parts[:2]) if path.parent != _ROOT / top else top
                counts[folder] = counts.get(folder, 0) + len(_matches(_texts(path)))
    return counts


def test_code_becomes_plainer():
    """A folder whose number has fallen gets the lower number in translated_patterns.txt."""
    more = {folder: number for folder, number in _counts().items() if number > _AT_MOST.get(folder, 0)}
    assert not more, f"more matches than translated_patterns.txt allows ({_AT_MOST}): {more}"


def test_patterns_find_what_they_are_for():
    for text in ("also where shapes are deferred", "lies in memory", "is refused with a sentence", "waits for ever"):
        assert _matches(text), text
    for text in ("there is no GPU", "it is no longer there", "stands in for CUDA", "even if shapes are deferred"):
        assert not _matches(text), text
