"""The files beside the code that tell of the project, and what a source archive holds."""

from __future__ import annotations

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
    """The files of the project, as seen from its root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no checkout of git")
    return [name for name in listed.stdout.split() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def archive(sources, tmp_path_factory):
    """The names in the source archive, without its own folder, and its metadata. It is made from a copy of the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in sources:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats", "gztar"]
    subprocess.run(command, check=True, cwd=folder, timeout=120, capture_output=True)
    (made,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(made) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        metadata = tar.extractfile(next(name for name in tar.getnames() if name.endswith("/PKG-INFO"))).read().decode()
    return names, metadata


def test_the_source_archive_has_what_building_needs(sources, archive):
    names, _ = archive
    folders = ("build_backend/", "csrc/", "kvstore_plugin/", "mykvrun/", "stubs/", "tests/", "docs/")
    needed = [name for name in sources if name.startswith(folders) or name.endswith((".toml", ".cff"))]
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
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


def test_the_version_stands_in_one_file(sources):
    """Measurements name the version that was measured, and the changelog those that were released."""
    (version,) = re.findall(r"version=\"(.*)\"", (ROOT / "setup.py").read_text())
    measured = ("docs/benchmarks.md", "docs/benchmarks-hosts.md", "benchmarks/pictures.json", "CHANGELOG.md")
    holds = [
        name
        for name in sources
        if name not in measured
        and re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", (ROOT / name).read_text(errors="replace"))
    ]
    assert holds == ["setup.py"]


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert set(found) <= kinds and len(set(found)) == len(found)
