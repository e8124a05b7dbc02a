"""The Makefile, with a Python whose environments are empty and install nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]

# Creates environments whose programs record their calls.
_PYTHON = f"""#!/bin/sh
case "$*" in
"-m venv "*)
    mkdir -p "$3/bin"
    for program in python mykvrun; do
        printf '#!/bin/sh\\necho "%s $*" >> calls\\n' $program > "$3/bin/$program"
        chmod +x "$3/bin/$program"
    done ;;
*) exec {sys.executable} "$@" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def clone(tmp_path):
    """A clone without environments."""
    for entry in _ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("build", "dist", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "python").write_text(_PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def _make(clone, *arguments):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MPI", "MPICC", "VENV")
    }
    command = ["make", f"PYTHON={clone}/python", *arguments]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("options", [[], ["VENV=.venv-of-mine"]])
def test_an_environment_that_make_did_not_make_stays(clone, options):
    name = ".venv-of-mine" if options else ".venv"
    (clone / name).mkdir()
    (clone / name / "pyvenv.cfg").write_text("of the user")
    for target in ("demo", "test", "distclean"):
        done = _make(clone, target, *options)
        assert (done.returncode == 0) == (target == "distclean")
        assert (clone / name / "pyvenv.cfg").read_text() == "of the user", done.stdout
        if target != "distclean":
            assert f"make did not make {name}, and would have to delete what is there: remove it, or" in done.stderr
    assert not (clone / "calls").exists()

    other = _make(clone, "demo", "VENV=.venv-make")
    assert other.returncode == 0, other.stderr
    assert (clone / name / "pyvenv.cfg").exists() and (clone / ".venv-make/bin").exists()


def test_an_environment_of_make_is_made_anew_and_cleaned_away(clone):
    assert _make(clone, "demo").returncode == 0
    (clone / ".venv/of an older Python").touch()
    for stamp in (clone / ".venv").glob(".made-3*"):  # as where making it was interrupted, or another Python made it
        stamp.unlink()
    again = _make(clone, "demo")
    assert again.returncode == 0, again.stderr
    assert not (clone / ".venv/of an older Python").exists()
    assert _make(clone, "distclean").returncode == 0
    assert not (clone / ".venv").exists()


def test_the_demo_starts_as_the_readme_teaches(clone):
    assert _make(clone, "demo").returncode == 0
    assert (clone / "calls").read_text().splitlines()[-1] == "mykvrun -n 2 python examples/digits.py"


def test_pages_name_another_environment_for_users(clone):
    """The README's environment is not one of make's environments."""
    pages = [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"-m venv (\S+)", page.read_text())}
    assert {page for page, _ in named} >= {"README.md"}
    of_make = set(re.findall(r"\.venv[\w-]*", (_ROOT / "Makefile").read_text()))
    assert ".venv" in of_make
    assert not {name for _, name in named} & of_make
    ignored = _ROOT / ".gitignore"  # a source archive has none
    assert not ignored.exists() or "/.venv*/" in ignored.read_text().splitlines()
    assert all(name.startswith(".venv-") for _, name in named)
