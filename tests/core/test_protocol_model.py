"""The models of the protocol, their smallest configurations (all: tests/sanitizers/model.py)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="spin or gcc is not installed"
)


@pytest.fixture(scope="module")
def check():
    path = Path(__file__).parents[1] / "sanitizers/model.py"
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


def test_no_order_of_events_ends_in_a_deadlock_or_a_torn_slice(check):
    found, states = check("RANKS=3 OPERATIONS=1 FIRST=OWNED")
    assert found is None and states > 50_000


@pytest.mark.parametrize("error", ["WAIT_WITHOUT_SEEN", "COUNTED_BEFORE_WRITTEN"])
def test_an_error_in_the_protocol_would_be_found(check, error):
    found, _ = check(f"RANKS=2 {error}")
    assert found is not None


def test_a_rank_that_goes_leaves_no_rank_of_another_host_waiting(check):
    found, states = check("HOSTS=2 LOCAL=2 SLICES=1 GOING=1", model="departures")
    assert found is None and states > 50_000


@pytest.mark.parametrize("error", ["NO_NOTICE", "ENDS_ITS_OWN", "NO_LOOK_AT_START"])
def test_an_error_in_departures_would_be_found(check, error):
    found, _ = check(f"HOSTS=2 LOCAL=1 GOING=1 {error}", model="departures")
    assert found is not None


def test_no_ring_is_lost_between_the_thread_and_a_stand_in(check):
    found, states = check("CHANGES=1", model="loop")
    assert found is None and states > 50_000


@pytest.mark.parametrize("error", ["RINGS_THE_THREAD", "NO_RING_AT_THE_END", "SEEN_AFTER_ROUND"])
def test_an_error_in_who_has_the_loop_would_be_found(check, error):
    found, _ = check(f"CALLERS=1 {error}", model="loop")
    assert found is not None
