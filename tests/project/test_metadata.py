"""The project's metadata files, and the contents of a source archive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sources():
    """The files of the project, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no checkout of git")
    return [name for name in listed.stdout.split() if (ROOT / name).is_file()]


_HOST = "https://host.example/group/mykv"


@pytest.fixture(scope="module")
def made(sources, tmp_path_factory):
    """The source archive, made from a copy of the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in sources:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats", "gztar"]
    environment = {**os.environ, "MYKV_SOURCE_URL": _HOST}
    subprocess.run(command, check=True, cwd=folder, timeout=120, capture_output=True, env=environment)
    (path,) = (folder / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def archive(made):
    """The names in the source archive, without its own folder, and its metadata."""
    with tarfile.open(made) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        metadata = tar.extractfile(next(name for name in tar.getnames() if name.endswith("/PKG-INFO"))).read().decode()
    return names, metadata


def test_the_source_archive_has_what_building_needs(sources, archive):
    names, _ = archive
    folders = ("build_backend/", "csrc/", "kvstore_plugin/", "mykv/", "mykvrun/", "tests/", "docs/")
    needed = [
        name for name in sources if name.startswith(folders) or name.endswith((".toml", ".cff", "CMakeLists.txt"))
    ]
    assert len(needed) > 400
    assert not [name for name in needed if name not in names]
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


def test_metadata_name_every_python_and_one_version(archive):
    _, metadata = archive
    (version,) = re.findall(r"version=\"(.*)\"", (ROOT / "setup.py").read_text())
    assert f"\nVersion: {version}\n" in metadata
    for minor in range(8, 13):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}\n" in metadata
    assert "\nKeywords: " in metadata and "Typing :: Typed" in metadata
    assert f"\nProject-URL: Source, {_HOST}\n" in metadata
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


def test_the_version_stands_in_one_file(sources):
    """Measurements name the measured version, and the changelog the released versions."""
    (version,) = re.findall(r"version=\"(.*)\"", (ROOT / "setup.py").read_text())
    measured = ("docs/benchmarks.md", "docs/benchmarks-hosts.md", "benchmarks/pictures.json", "CHANGELOG.md")
    holds = [
        name
        for name in sources
        if name not in measured
        and re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", (ROOT / name).read_text(errors="replace"))
    ]
    assert holds == ["setup.py"]


def test_twine_accepts_the_source_archive(made):
    pytest.importorskip("twine")
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", made], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0 and "PASSED" in checked.stdout, checked.stdout + checked.stderr


def test_wheels_and_releases_are_checked_by_twine():
    """The programs that create the uploaded files; the workflow itself was never run."""
    for name in ("build_backend/build_wheels.py", ".github/workflows/release.yml"):
        text = (ROOT / name).read_text()
        assert re.search(r"twine\W+check\W+--strict", text), name


def test_metadata_name_no_host_that_the_build_does_not_know():
    environment = {name: value for name, value in os.environ.items() if name != "MYKV_SOURCE_URL"}
    code = "import sys; sys.argv = ['setup.py', '-q', '--version']; import setup; print(setup.project_urls())"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout.splitlines()[-1] == "{}", told.stderr


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert set(found) <= kinds and len(set(found)) == len(found)
