"""The calculator of docs/cost.md against what was measured, and the program as the page shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.support import IS_2

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT))  # behind an installed package

from benchmarks import estimate, model, page_figures  # noqa: E402
from benchmarks.results import Results  # noqa: E402

_PAGE = (_ROOT / "docs/cost.md").read_text()
_SUMS, _SMALL, _STEPS, _MEMORY = estimate.ERRORS.values()
_KB, _MB = 1024, 1024 * 1024
_RESNET18, _RESNET50, _BERT = 46.8e6, 102.2e6, 438e6
_WIRES = {"none": "none", "float16": "fp16", "2bit": "2bit"}


def _rows(page: str) -> dict[tuple[str, str], float]:
    """Medians of mykv as installed beside a page of benchmarks, times in seconds: by work, and hosts x ranks."""
    rows = [row for row in page_figures.times(page) if row[2] in ("mykv", "mykv core") and row[3] == "as installed"]
    return {(row[0], row[1]): float(row[4]) * (1e-3 if row[7] == "ms" else 1) for row in rows}


_HOSTS, _HOST = _rows("benchmarks-hosts"), _rows("benchmarks")


def test_the_model_has_the_grids_of_the_core():
    from compiled import testing

    assert model.grid(64) == (1, 64)
    for hosts in [*range(65, 300), 1000, 1024, 4096]:
        rows = testing.square_grid(hosts)
        assert model.grid(hosts) == (len(rows), len(rows[0]))


def _seconds(nbytes: float, size: str, **more) -> float:
    hosts, _, workers = size.rpartition("x")
    job = estimate.Job(int(nbytes), 0.0, 0.0, int(hosts or 1), int(workers), **more)
    return estimate.cost(job).communication


def _off(modelled: float, measured: float) -> float:
    return abs(modelled / measured - 1)


def test_sums_of_several_hosts_are_as_measured():
    sums = {key: time for key, time in _HOSTS.items() if re.match(r"(in place|pushpull)/(16777216|67108864)$", key[0])}
    assert len(sums) >= 25
    for (case, size), time in sums.items():
        assert _off(_seconds(int(case.rpartition("/")[2]), size, link=1e9), time) <= _SUMS, (case, size)
    for name, compression in _WIRES.items():
        modelled = _seconds(64 * _MB, "2x1", link=2e8, compression=compression)
        assert _off(modelled, _HOSTS[f"compressed/{64 * _MB}/{name}", "2x1"]) <= _SUMS, name


def test_small_sums_are_as_measured_and_messages_as_fitted():
    results = Results()
    for size in ("2x1", "4x1", "8x1"):
        time = _HOSTS[f"pushpull/{4 * _KB}", size]
        assert _off(_seconds(4 * _KB, size, link=1e12), time) <= _SMALL, size
        about = {"peer": "mykv core", "setup": "as installed", "ranks": size, "round": 0}
        results.records.append({**about, "case": f"pushpull/{4 * _KB}", "series": "time", "numbers": [time]})
    fitted = model.fitted(results)
    assert fitted.message == pytest.approx(estimate.MESSAGE, rel=0.03)
    assert fitted.latency == pytest.approx(estimate.LATENCY, abs=1e-6)


def test_steps_are_as_measured():
    compute = _HOSTS["stream/own: compute", "2x1"]
    job = estimate.Job(int(_RESNET18), compute / 3, compute / 1.5, 2, link=1e9)
    assert _off(estimate.cost(job).step, _HOSTS["stream/own: step", "2x1"]) <= _STEPS
    ready = _HOSTS["step/resnet18/own", "2x1"]
    assert _off(estimate.cost(job).communication, ready) <= _STEPS


def test_one_host_is_as_measured():
    for name, nbytes in (("resnet50", _RESNET50), ("bert", _BERT)):
        assert _off(_seconds(nbytes, "2"), _HOST[f"gradients/{name}/own", "2"]) <= _MEMORY, name
    assert _off(_seconds(_RESNET50, "4"), _HOST["gradients/resnet50/own", "4"]) <= _MEMORY
    page = (_ROOT / "docs/benchmarks.md").read_text()
    for name in ("ResNet-50", "BERT-base"):
        beyond = float(re.search(rf"{name}: (\d+) MB beyond two processes", page).group(1))
        assert beyond == pytest.approx(1e-6 * estimate.OWN_MEMORY, abs=10), name
    assert pytest.approx(_HOSTS["late: share", "2x1"], rel=0.02) == estimate.WAITING


def test_parts_of_a_cost_go_together():
    job = estimate.Job(int(_RESNET50), 0.06, 0.12, hosts=4, workers=2, link=1e10, states=2)
    whole = estimate.cost(job)
    assert whole.crossing == 2 * job.nbytes * 3 / 4
    assert whole.step == pytest.approx(0.18 + whole.not_hidden) and whole.not_hidden > 0
    assert estimate.cost(estimate.Job(job.nbytes, 0.06, 0.12, hosts=1)).step == pytest.approx(0.18)
    assert estimate.bits("2.5gbit") == 2.5e9 and estimate.bits("200MBIT") == 2e8


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.estimate", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)


def test_errors_are_those_that_the_page_names():
    for most in estimate.ERRORS.values():
        assert f"{most:.0%}" in _PAGE


@pytest.mark.skipif(IS_2, reason="the model zoo of MXNet 2.0 takes no arrays of MXNet 1.9")
def test_the_program_prints_what_the_page_shows():
    command = re.search(r"^python -m benchmarks\.estimate (.*)$", _PAGE, re.MULTILINE).group(1)
    result = _run(*command.split())
    assert result.returncode == 0, result.stderr
    assert f"```\n{result.stdout}```" in _PAGE, result.stdout


@pytest.mark.skipif(IS_2, reason="the model zoo of MXNet 2.0 takes no arrays of MXNet 1.9")
def test_the_program_measures_a_network():
    result = _run("--model", "mobilenet0.25", "--hosts", "2", "--batch-size", "1")
    times = re.search(r"^forward, backward +([\d.]+) ms, ([\d.]+) ms$", result.stdout, re.MULTILINE)
    assert times and min(map(float, times.groups())) > 0, result.stdout + result.stderr


def test_the_program_refuses_what_it_cannot_know():
    for arguments in (["--parameters", "110e6"], ["--parameters", "110e6", "--forward", "3"], ["--model", "resnet50"]):
        link = ["--link", "fast"] if "--model" in arguments else []
        result = _run(*arguments, "--hosts", "2", *link)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
