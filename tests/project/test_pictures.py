"""docs/pictures.md agrees with benchmarks/pictures.json and the pages of benchmarks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT))

from benchmarks import pictures_page  # noqa: E402

_PAGE = _ROOT / "docs" / "pictures.md"
_RESULTS = json.loads((_ROOT / "benchmarks" / "pictures.json").read_text())


def test_the_page_is_that_of_the_results():
    """After a new run of the benchmarks: python -m benchmarks.pictures --draw."""
    assert _PAGE.read_text() == pictures_page.text(_RESULTS, _PAGE.stem)


def test_each_picture_is_shown_once():
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+\.svg)\)", _PAGE.read_text())
    assert sorted(shown) == sorted(one.name for one in (_ROOT / "docs" / "pictures").iterdir())


def test_the_page_names_the_options_of_the_runs():
    pytest.importorskip("matplotlib")
    from benchmarks import picture_plots, pictures

    assert f"means of {picture_plots.MEAN_OF} steps" in _PAGE.read_text()
    for mode, job in pictures.MODES.items():
        for name, value in job["options"].items():
            assert str(value).replace("'", '"') in pictures_page._WHAT[mode] and name in pictures_page._WHAT[mode]


def test_the_ways_over_the_slow_link_learned():
    for mode, runs in _RESULTS["times"].items():
        assert all(run["epochs"][-1][1] > 0.9 for run in runs), mode
