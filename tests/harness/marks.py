"""The mark ``ranks``: read the same way by the controller and by the ranks, so that both see the same test ids."""

from __future__ import annotations

import dataclasses
import os

import pytest

ON_REAL_GPU = os.environ.get("MYKV_TEST_GPU") == "1"
_DEFAULT_TIMEOUT = 60.0  # seconds
_SETTING = "MYKV_"  # prefix of the variables that the package reads in init()
_OWN_POOL = "MYKV_TEST_POOL"  # names a pool whose ranks use the core without the package


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One mark, as written in a test."""

    sizes: tuple[int, ...]
    long_sizes: tuple[int, ...]
    env: tuple[tuple[str, str], ...]  # sorted, so that it can be part of a key
    timeout: float

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The part of `env` that a running process can change, since init() reads it."""
        return tuple(one for one in self.env if self._is_setting(one[0]))

    @property
    def process_env(self) -> tuple[tuple[str, str], ...]:
        """The part of `env` that a process must be started with."""
        return tuple(one for one in self.env if not self._is_setting(one[0]))

    def _is_setting(self, variable: str) -> bool:
        return variable.startswith(_SETTING) and _OWN_POOL not in dict(self.env)


def ranks_of(node: pytest.Item) -> Ranks | None:
    """The closest mark of a test, or None for a test that runs in the controller."""
    mark = node.get_closest_marker("ranks")
    return _parse(*mark.args, **mark.kwargs) if mark else None


def needs_standin(why: str) -> pytest.MarkDecorator:
    """The mark of a GPU test that a real GPU cannot run."""
    return pytest.mark.skipif(ON_REAL_GPU, reason=f"needs the stand-in: {why}")


def long(*values: object, **named: object):
    """Values of a parametrization that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long, **named)


def _parse(
    *sizes: int, long: tuple[int, ...] = (), env: dict[str, str] | None = None, timeout: float = _DEFAULT_TIMEOUT
) -> Ranks:
    if not sizes or not all(isinstance(size, int) and size > 0 for size in (*sizes, *long)):
        raise pytest.UsageError(f"pytest.mark.ranks needs numbers of ranks, it got {sizes} and long={long}.")
    return Ranks(sizes, long, tuple(sorted((env or {}).items())), timeout)


def parametrize_size(metafunc: pytest.Metafunc) -> None:
    """Create one test for each number of ranks, with the argument ``size``."""
    ranks = ranks_of(metafunc.definition)
    if ranks:
        if "size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("size")
        sizes = [*ranks.sizes, *map(long, ranks.long_sizes)]
        metafunc.parametrize("size", sizes, ids=[f"{size}ranks" for size in (*ranks.sizes, *ranks.long_sizes)])
