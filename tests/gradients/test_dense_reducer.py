"""How the gradients of a trainer are divided into groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvstore_plugin.gradients import dense_reducer


@pytest.mark.parametrize(
    ("trained", "num_groups", "groups"),
    [
        ("111111", 0, [None] * 6),
        ("111111", 1, [0] * 6),
        ("111111", 2, [0, 0, 0, 1, 1, 1]),
        ("111111", 4, [0, 0, 1, 2, 2, 3]),
        ("111111", 6, [0, 1, 2, 3, 4, 5]),
        ("111", 100, [0, 33, 66]),
        ("001111", 2, [0, 0, 0, 0, 1, 1]),  # frozen parameters do not count
        ("110110", 2, [0, 0, 1, 1, 1, 1]),
        ("00", 3, [0, 0]),
    ],
)
def test_groups_have_equally_many_trained_parameters(trained, num_groups, groups):
    parameters = [SimpleNamespace(grad_req="write" if one == "1" else "null") for one in trained]
    slots = [SimpleNamespace(parameter=parameter, group=None) for parameter in parameters]
    dense_reducer._divide(slots, num_groups)
    assert [slot.group for slot in slots] == groups
