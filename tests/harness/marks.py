"""The mark ``ranks``: read the same way by the controller and by the ranks, so that both see the same test ids."""

from __future__ import annotations

import dataclasses

import pytest

_DEFAULT_TIMEOUT = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One mark, as written in a test."""

    sizes: tuple[int, ...]
    env: tuple[tuple[str, str], ...]  # sorted, so that it can be part of a key
    timeout: float


def ranks_of(node: pytest.Item) -> Ranks | None:
    """The closest mark of a test, or None for a test that runs in the controller."""
    mark = node.get_closest_marker("ranks")
    return _parse(*mark.args, **mark.kwargs) if mark else None


def _parse(*sizes: int, env: dict[str, str] | None = None, timeout: float = _DEFAULT_TIMEOUT) -> Ranks:
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"pytest.mark.ranks needs numbers of ranks, it got {sizes}.")
    return Ranks(sizes, tuple(sorted((env or {}).items())), timeout)


def parametrize_size(metafunc: pytest.Metafunc) -> None:
    """Make one test of each number of ranks, with the argument ``size``."""
    ranks = ranks_of(metafunc.definition)
    if ranks:
        if "size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("size")
        metafunc.parametrize("size", ranks.sizes, ids=[f"{size}ranks" for size in ranks.sizes])
