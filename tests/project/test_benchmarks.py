"""The pages of benchmarks from given results, and the machine's limits for comparison."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT))  # behind an installed package

from benchmarks import cases, environments, launch, peers, targets  # noqa: E402
from benchmarks.cases import KB, MB  # noqa: E402
from benchmarks.results import Results  # noqa: E402

_SMALL, _LARGE = f"pushpull/{4 * KB}", f"pushpull/{64 * MB}"
_CPU = "cpu of all ranks"


def _results(*measured: tuple, peers: tuple[str, ...] = ("mykv", "mpi")) -> Results:
    """Results from (peer, case, seconds), optionally with setup, ranks, series."""
    made = Results(about={"machine": {"cores": "2"}, "peers": list(peers)})
    for peer, case, seconds, *more in measured:
        setup, ranks, series = [*more, *("as installed", 2, "time")[len(more) :]]
        about = {"peer": peer, "setup": setup, "ranks": ranks, "round": 0}
        made.records.append({**about, "case": case, "series": series, "numbers": [seconds] * 3})
    return made


def _verdicts(key: str, results: Results) -> list[bool | None]:
    line = next(line for line in targets.LINES if line.key == key)
    return [part.reached for part in line.parts(results)]


def test_small_sums_are_judged_without_binding():
    theirs = [("horovod", _SMALL, 1e-3), ("dist_sync", _SMALL, 1e-3)]
    assert _verdicts("pushpull-4KB", _results(*theirs, ("mykv", _SMALL, 0.9e-3), ("mykv", _SMALL, 1e-5, "bound"))) == [
        False,
        False,
        None,
        None,
    ]


def test_large_sums_are_judged_beside_the_loops_of_two_ranks():
    ours = [("mykv", _LARGE, 5e-3), ("horovod", _LARGE, 40e-3), ("mpi", _LARGE, 20e-3)]
    loops = [("limit", f"limit/{64 * MB}", 4e-3, "as installed", 2, "plain")]
    others = [("limit", f"limit/{64 * MB}", 1e-3, "as installed", 32, "plain")]
    assert _verdicts("pushpull-64MB", _results(*ours, *loops, *others)) == [True, True, None, None, True]
    assert _verdicts("pushpull-64MB", _results(*ours, *others))[-1] is None


def test_processor_time_of_many_ranks_is_that_of_one_rank():
    case = f"in a row/{4 * KB}"
    found = _results(
        *(("mykv core", case, cpu, "as installed", n, _CPU) for n, cpu in ((2, 6e-6), (4, 16e-6), (8, 5e-5)))
    )
    assert _verdicts("cpu-of-ranks", found)[:3] == [None, True, False]


def test_the_loops_of_many_processes_sum_and_all_of_them_pass_the_barrier(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "HOME", tmp_path)
    work = [{**cases.barrier(), "iterations": 5}, {**cases.limit(256 * KB), "iterations": 2}]
    lines = launch.launch(peers.LIMIT, 4, work, 60.0)  # each process looks at the sums
    assert len(lines) == 4
    for mine in lines:
        assert {line["case"] for line in mine} == {"barrier", f"limit/{256 * KB}"}
        assert all(number > 0 for line in mine for number in line["numbers"])


@pytest.mark.long
def test_what_clipping_costs_is_measured_in_all_ways(mpirun):
    found = mpirun(
        2,
        f"""
import sys
sys.path.append({str(_ROOT)!r})
sys.argv = ["clipping", "--batch", "1", "--turns", "1"]
from benchmarks import clipping
clipping.main()
""",
    )
    assert found.code == 0, found.text
    for way in ("no clipping", "norm alone", "scaled", "gluon.utils.clip_global_norm", "no clipping again"):
        assert re.search(rf"^{re.escape(way)} +\d\.\d+ \(", found.stdout, re.MULTILINE), found.text


def test_the_page_says_where_others_are_faster_and_what_is_not_installed(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import report

    ours = [("mykv", _SMALL, 4e-5), ("mykv", _LARGE, 5e-3)]
    found = _results(*ours, ("mpi", _SMALL, 1e-5), ("mpi", _LARGE, 20e-3))
    found.about["no intel mpi"] = "Intel MPI could not be installed, see LOG."
    assert "4.0 times faster (0.010 ms, mykv 0.040 ms)" in report._not_faster(found)
    assert "64 MB" not in report._not_faster(found)
    assert any("Intel MPI" in row and row.endswith("| not installed |") for row in report._short_rows(found))
    assert "see LOG" in report._failures(found)
    first_page = tmp_path / "README.md"
    first_page.write_text("| sum of an array of 4 KB | 1 ms |\n| other | 1 ms |\n")
    report.repeat_in(first_page, found)
    assert first_page.read_text().splitlines() == [
        "| sum of an array of 4 KB | 0.040 ms |  |  | **0.010 ms** |",
        "| other | 1 ms |",
    ]


def test_the_versions_of_an_environment_without_the_core():
    """Horovod's environment is one."""
    line = [sys.executable, "-S", launch.WORKER, "versions"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    assert json.loads(done.stdout)["Python"] == platform.python_version()


@pytest.mark.parametrize("page", ["benchmarks", "benchmarks-hosts"])
def test_the_run_on_another_machine_stands_on_its_page(page):
    pytest.importorskip("matplotlib")
    from benchmarks import report

    text = (_ROOT / f"docs/{page}.md").read_text()
    assert report.another_machine(page).rstrip() in text
    assert text.index("## The most important figures") < text.index("## On another machine")


def test_a_run_is_kept_as_that_of_another_machine(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import report

    monkeypatch.setattr(report, "OTHERS", tmp_path)
    monkeypatch.setattr(report, "notes", lambda: {"another machine: page": "Slower."})
    found = _results(("mykv", _SMALL, 4e-5))
    found.about.update(rounds=3, commit="abc", machine={"cores": "2", "processor": "P", "system": "S"})
    assert report.another_machine("page") == ""
    report._keep_as_another_machine("page", found, report._short_rows(found))
    text = report.another_machine("page")
    assert "3 rounds of commit abc on P, S:" in text and "| 0.040 ms (0.040 to 0.040) |" in text
    assert text.endswith(" |\n\nSlower.")  # a blank line ends the table
