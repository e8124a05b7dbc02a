"""How long nothing has moved, by which ranks that wait for a rank that has gone give up."""

from __future__ import annotations

from compiled import testing


def test_time_in_which_something_moved_does_not_count():
    counted = testing.standstill_after(0.6, 0.2)
    assert 0.2 <= counted < 0.6 + 0.2, counted


def test_at_most_a_second_between_two_looks_counts():
    """A process that was itself stopped does not consider the other ranks stopped."""
    assert testing.standstill_after(0.0, 1.3) == 1.0
