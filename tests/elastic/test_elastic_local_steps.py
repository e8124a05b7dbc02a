"""Workers that train alone with a LocalTrainer die, and the others go on from the last commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long

_WORKER = Path(__file__).parents[1] / "programs" / "elastic_local_steps.py"
_LIMIT_S = 150.0
_BMUF = {"period": 2, "warmup_steps": 3, "outer_learning_rate": 0.8, "outer_momentum": 0.5, "nesterov": True}

pytestmark = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")


@pytest.mark.parametrize(
    "options, deaths",
    [
        # Commits are after steps 5, 10 and 15, and each begins a new period.
        (_BMUF, {"1": ["step", 8], "0": ["meeting", 11]}),
        long(_BMUF, {"2": ["step", 1], "0": ["commit", 10]}),
        long({**_BMUF, "period": 100}, {"0": ["step", 9]}),
        long({"period_seconds": 0.05, "overlap": True, "outer_momentum": 0.5}, {"0": ["meeting", 12]}),
    ],
    ids=["a step and a meeting", "the warm-up and a commit", "a long period", "periods in seconds"],
)
def test_survivors_go_on_from_the_last_commit(mpirun, options, deaths):
    plan = {"options": options, "deaths": deaths, "steps": 18, "every": 5}
    result = mpirun(3, _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    died = set(re.findall(r"^dies (\d)$", result.stdout, re.MULTILINE))
    ends = re.findall(r"^end (\d) size (\d) steps (\d+) weights (\d+) difference (\S+)$", result.stdout, re.MULTILINE)
    if "period_seconds" not in options:  # there a worker may begin no meeting in this very step
        assert died == set(deaths), result.text
    assert {me for me, *_ in ends} == set("012") - died, result.text
    assert len({weights for *_, weights, _ in ends}) == 1, result.text
    for _, size, steps, _, difference in ends:
        assert int(size) == 3 - len(died) and int(steps) == 18, result.text
        assert difference == "none" or float(difference) < 1e-5, result.text
