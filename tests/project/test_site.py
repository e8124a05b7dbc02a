"""The documentation as a site: it builds, needs no network, and its search works in pages opened as files."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MKDOCS = _ROOT / ".venv-docs/bin/mkdocs"  # `make docs` makes it

# Automatic requests of a browser: a tag, its attribute, and the relations for which a <link> is fetched.
_FETCHED = {**dict.fromkeys(["script", "img", "iframe", "source", "video"], "src"), "object": "data", "link": "href"}


class _Fetches(HTMLParser):
    """Collects the addresses that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes):
        address = dict(attributes).get(_FETCHED.get(tag, ""))
        if address and not (tag == "link" and dict(attributes).get("rel") in ("canonical", "next", "prev")):
            self.addresses.append(address)


def _fetched(html: str) -> list[str]:
    page = _Fetches()
    page.feed(html)
    return page.addresses


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if not _MKDOCS.exists():
        pytest.skip("there is no .venv-docs: make docs")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(_MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        addresses = _fetched(page.read_text())
        assert any(address.endswith(".css") for address in addresses), "style sheets are seen"
        elsewhere = [address for address in addresses if re.match(r"(\w+:)?//", address)]
        assert not elsewhere, f"{page.name}: {elsewhere}"
        for address in addresses:
            path = (page.parent / re.sub(r"[?#].*", "", address)).resolve()
            # 404.html is for a server's root, so its addresses begin with a slash.
            assert address.startswith(("data:", "/")) or path.exists(), f"{page.name}: {address} is missing"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"""(?:url\(|@import)\s*['"]?(?:https?:)?//[^)'"]*""", sheet.read_text()), sheet
    # The theme loads mermaid from another site if a page has such a diagram.
    assert not any('class="mermaid"' in page.read_text() for page in pages)


def test_search_works_from_files(site):
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")
    scripts = [address for address in _fetched((site / "index.html").read_text()) if address.endswith(".js")]
    assert "assets/iframe-worker.js" in scripts, scripts
    assert (site / "running.html").exists(), "pages are files of their own, which links name whole"
