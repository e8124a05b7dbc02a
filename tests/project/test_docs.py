"""The API reference and the table of settings are complete, and the programs on the pages about migration work."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import kvstore_plugin
import pytest
from harness.marks import long
from harness.support import IS_2
from kvstore_plugin.world import settings

_DOCS = Path(__file__).parents[2] / "docs"
_API = (_DOCS / "reference/api.md").read_text()
_PYTHON_OF_DOCS = _DOCS.parent / ".venv-docs/bin/python"
_VALUES = {name: getattr(kvstore_plugin, name) for name in sorted(kvstore_plugin.__all__)}


def test_api_reference_lists_every_public_name_once():
    listed = re.findall(r'^<a id="kvstore_plugin\.(\w+)"></a>$', _API, re.MULTILINE)
    assert sorted(listed) == list(_VALUES)


@pytest.mark.parametrize("name", [name for name, value in _VALUES.items() if inspect.isroutine(value)])
def test_api_reference_has_the_signature_and_the_docstring(name):
    """Of functions, where nothing but the package is needed; the next test compares all of it."""
    signature, text = _API.split(f'<a id="kvstore_plugin.{name}"></a>')[1].split("```python\n")[1].split("```", 1)
    own = inspect.signature(_VALUES[name]).parameters
    assert [key for key in own if not re.search(rf"\b{key}\b", signature)] == []
    shown = re.sub(r"\[([\w-]+\.md)\]\(.+?\)", r"docs/\1", text)
    assert inspect.getdoc(_VALUES[name]).splitlines()[0].replace("``", "`") in shown


def test_the_generated_pages_are_as_the_sources_are():
    if not _PYTHON_OF_DOCS.exists():
        pytest.skip("there is no .venv-docs: make docs")
    command = [str(_PYTHON_OF_DOCS), str(_DOCS / "reference/write.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", [name for name, value in _VALUES.items() if inspect.isroutine(value)])
def test_public_functions_have_docstrings(name):
    assert inspect.getdoc(_VALUES[name]), name


@pytest.mark.parametrize("name", [name for name, value in _VALUES.items() if inspect.isclass(value)])
def test_public_classes_and_their_methods_have_docstrings(name):
    assert _VALUES[name].__doc__, name
    for key, member in vars(_VALUES[name]).items():
        if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{key}"


def _rows(text):
    """Names and defaults in a table of settings, as one line each: of Markdown, or of a docstring."""
    markdown = re.findall(r"^\| `(MYKV_\w+)` \| *(\S*) *\| \S", text, re.MULTILINE)
    return markdown or re.findall(r"^(MYKV_\w+) +((?:[a-z]+|\d+)(?= {2}))?", text, re.MULTILINE)


def test_the_page_on_settings_lists_every_setting_with_its_default():
    page = (_DOCS / "settings.md").read_text()
    table = _rows(page[: page.index("\n## ")])
    assert sorted(name for name, _ in table) == sorted(settings._TABLE), "settings.md and settings.py differ"
    assert dict(table) == dict(_rows(settings.__doc__)), "settings.md and the docstring of settings.py differ"
    for name, default in table:
        known = settings._TABLE[name].default
        # None: the default is the core's, and the docstring's words are compared alone.
        assert known is None or str(known) in (default, f"{default}.0"), f"{name}: {default} is not {known}"


def test_other_pages_name_settings_that_exist():
    for page in _DOCS.glob("*.md"):
        named = set(re.findall(r"`(MYKV_[A-Z_]+)", page.read_text())) - {
            "MYKV_ABIS",
            "MYKV_BUILD_JOBS",
            "MYKV_WERROR",
            "MYKV_",
        }
        named = {name for name in named if not name.startswith("MYKV_TEST")}
        assert named <= set(settings._TABLE), f"{page.name}: {named - set(settings._TABLE)}"


def _scripts(page):
    """The programs on a page about migration: one before and one or two after, and other pieces of code."""
    return re.findall(r"^```python\n(.*?)^```", (_DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def _after(page, number):
    """A program on a page about migration that runs here: for Horovod the page shows the line that changes."""
    script = _scripts(page)[number]
    if page != "from-horovod.md":
        return script
    old, new = re.search(r"^```diff\n-(.+)\n\+(.+)\n```", (_DOCS / page).read_text(), re.MULTILINE).groups()
    assert script.splitlines().count(old) == 1
    return script.replace(old, new)


@pytest.mark.skipif(IS_2, reason="blocks of MXNet 2.0 do not take the arrays of such scripts")
@pytest.mark.parametrize(
    ("page", "number"),
    [("from-horovod.md", 0), long("from-byteps.md", 1), long("from-dist-sync.md", 1), ("from-dist-sync.md", 2)],
)
def test_scripts_after_migration_learn_the_same_on_both_workers(mpirun, page, number):
    _learns_the_same(mpirun, _after(page, number))


_OTHER_FRAMEWORKS = ["from-pytorch.md", "from-megengine.md", "from-caffe2.md"]


@pytest.mark.skipif(IS_2, reason="blocks of MXNet 2.0 do not take the arrays of such scripts")
@pytest.mark.parametrize("page", [_OTHER_FRAMEWORKS[0], *map(long, _OTHER_FRAMEWORKS[1:])])
def test_code_after_the_first_script_is_one_program(mpirun, tmp_path, page):
    _learns_the_same(mpirun, "\n".join(_scripts(page)[1:]), cwd=str(tmp_path))


@pytest.mark.parametrize("page", _OTHER_FRAMEWORKS)
def test_pages_use_public_names_only(page):
    named = set(re.findall(r"\bmykv\.(\w+)", (_DOCS / page).read_text()))
    assert named and named <= set(_VALUES), named - set(_VALUES)


def _learns_the_same(mpirun, script, **options):
    """Run a page's program on two workers: the losses of its three epochs fall, and both end with the same weights."""
    assert "kvstore_plugin" in script
    result = mpirun(
        2, script + "\nimport zlib\nprint('weights', zlib.crc32(net.weight.data().asnumpy().tobytes()))\n", **options
    )
    assert result.code == 0, result.text
    assert len(set(re.findall(r"weights (\d+)", result.stdout))) == 1, result.text
    losses = [float(loss) for loss in re.findall(r"^(?:worker 0, )?epoch \d: loss (\S+)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], result.text
