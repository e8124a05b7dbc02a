"""Short forms of the long runs in tests/torture, one or a few tries of each; `make torture` runs the long ones."""

from __future__ import annotations

import importlib.util
import random
import sys

import pytest
from harness import launcher
from harness.marks import long
from torture import (
    asymmetric,
    delays,
    drawing,
    elastic,
    ends,
    fuzz,
    happenings,
    idioms,
    keys,
    kills,
    launches,
    leave,
    program_asymmetric,
    program_idioms,
    programs,
    retry,
    soak,
    stops,
)
from torture.job import Ended
from torture.tally import Budget, Tally

_ENOUGH = 150.0  # seconds


def _survived(tally: Tally, least: int) -> None:
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.tried >= least


@pytest.mark.parametrize(
    "job",
    [
        ("torture.program_core", 3, 1, 4096, 150),
        ("torture.program_mxnet", 3, 2, 4096, 10),
        long(("torture.program_core", 4, 2, 524288, 40)),
    ],
)
def test_random_programs_end_right_or_with_the_error_that_was_planted(job):
    _survived(programs.run(Budget(_ENOUGH, seed=1, most=job[-1]), [job]), job[-1])


def test_programs_are_the_same_on_all_ranks_and_half_of_them_hold_a_fault():
    drawn = [drawing.program(seed, [4, 2], 2, 0.01) for seed in range(300)]
    assert drawn == [drawing.program(seed, [4, 2], 2, 0.01) for seed in range(300)]
    faults = {fault.what for _, fault in drawn if fault}
    assert faults >= {"shape", "dtype", "op", "scale", "root", "kind", "layout", "refused"}
    assert 100 < sum(fault is not None for _, fault in drawn) < 200


def test_workers_go_on_after_a_mistake_with_the_weights_of_a_run_without_it():
    job = ("torture.program_retry", 2, 1, 524288, 12)
    _survived(retry.run(Budget(_ENOUGH, seed=1, most=job[-1]), [job]), job[-1])


@pytest.mark.parametrize("target", [asymmetric, idioms])
def test_drawn_trainings_end_with_the_weights_of_the_plain_run(target):
    module = f"torture.program_{target.__name__.rpartition('.')[2]}"
    _survived(target.run(Budget(_ENOUGH, seed=1, most=2), [(module, 2, 1, 524288, 2)]), 2)


@pytest.mark.parametrize("module", [program_idioms, program_asymmetric])
def test_drawn_trainings_have_all_forms_and_pieces(module):
    drawn = [module.drawn(seed) for seed in range(300)]
    assert drawn == [module.drawn(seed) for seed in range(300)]
    assert {one.form for one in drawn} == {"own", "own on the store", "stock", "stock on the store"}
    assert {name for one in drawn for name, _ in one.phases} == set(module.PIECES)


def test_a_program_that_ends_its_job_is_one_failure_and_the_next_job_begins_behind_it(monkeypatch):
    begun = []

    class Ending:
        def __init__(self, ranks, module, first, *_, **__):
            begun.append(first)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def wait(self, seconds):
            return Ended(3, f"at {begun[-1]}\nFAILED program {begun[-1] + 2}, rank 0: planted\n", 1.0, False)

    monkeypatch.setattr(programs, "Job", Ending)
    tally = programs.run(Budget(_ENOUGH, seed=10, most=6), [("torture.planted", 2, 1, 4096, 100)])
    assert begun == [10, 13] and tally.tried == 6 and len(tally.failures) == 2
    assert "program 12" in tally.failures[0] and "planted" in tally.failures[0]


@pytest.mark.parametrize("case", [("core", 3, 1), long(("core", 4, 2)), long(("join", 3, 2))])
def test_a_killed_worker_ends_the_job_and_leaves_nothing(case):
    seed = random.Random(str(case)).randrange(1000)
    _survived(kills.run(Budget(_ENOUGH, seed, most=1), [case]), 1)


def test_a_job_ends_and_names_the_worker_that_has_ended_in_any_way_and_phase():
    cases = [
        ends.Case("sys.exit(0)", "after shutdown", 3, 2, 1, False, False, 0.5),
        ends.Case("alarm", "init", 2, 1, 0, True, False, 0.5),
    ]
    _survived(ends.run(Budget(_ENOUGH), cases, at_once=2), 2)
    drawn = {(one.kind, one.phase) for one in map(ends.drawn, range(17 * 12))}
    assert len(drawn) == 17 * 12


@pytest.mark.long
@pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")
def test_elastic_workers_outlive_those_that_are_killed():
    _survived(elastic.run(Budget(_ENOUGH, seed=5, most=1), [(3, 2, False, 1)]), 1)


@pytest.mark.long
def test_a_stopped_worker_is_named_and_goes_on_with_the_same_bits():
    _survived(stops.run(Budget(_ENOUGH, seed=1, most=1), [("stock on the store", 2, 1)]), 1)


def test_operations_end_on_all_hosts_when_ranks_leave_or_can_do_no_more():
    _survived(leave.run(Budget(_ENOUGH, seed=1807, most=12), [((2, 2), False)], at_once=1), 12)


def test_ranks_leave_fail_and_are_stopped_in_all_pairs():
    drawn = [happenings.program(seed, 4, 2) for seed in range(1500)]
    assert drawn == [happenings.program(seed, 4, 2) for seed in range(1500)]
    pairs = {tuple(sorted(one.what for one in both)) for _, both in drawn}
    kinds = {what for pair in pairs for what in pair}
    assert kinds == {*happenings.CAUSES, "stopped", "stopped with the table locked"}
    assert pairs >= {tuple(sorted((one, other))) for one in kinds for other in kinds}


@pytest.mark.long
def test_delays_do_not_change_a_bit():
    _survived(delays.run(Budget(_ENOUGH, seed=1, most=1), [("store", 3, 1)], runs=3, steps=5), 3)


def test_small_steps_hold_nothing():
    _survived(soak.run(Budget(2.0, most=20000), [("core", 2, 1, 1.0)]), 1000)


def test_keys_that_were_dropped_leave_nothing():
    _survived(keys.run(Budget(_ENOUGH, most=2000), [("core", 2, 1, 500)]), 6000)


@pytest.mark.long
def test_jobs_end_well_that_only_make_a_world():
    _survived(launches.run(Budget(_ENOUGH, most=3), [(1, True), (2, False)]), 3)


def test_a_parser_bears_what_a_fuzzer_tries_or_the_tool_is_noted_as_missing():
    tally = fuzz.run(Budget(_ENOUGH, most=300), ["settings"])
    if importlib.util.find_spec("atheris") is None:
        assert tally.is_missing and not tally.tried and "atheris is not installed: settings" in tally.notes[0]
    else:
        _survived(tally, 300)


def test_an_input_that_a_parser_does_not_bear_is_a_failure(monkeypatch):
    script = "import sys; sys.exit('number_of_executed_units: 7\\nValueError: planted')"
    monkeypatch.setattr(
        fuzz.fuzzers, "commands", lambda _, names: {one: [sys.executable, "-c", script] for one in names}
    )
    tally = fuzz.run(Budget(_ENOUGH), ["news"])
    assert tally.tried == 7 and len(tally.failures) == 1, tally
    assert "ValueError: planted" in tally.failures[0] and "crashes-news" in tally.failures[0]
