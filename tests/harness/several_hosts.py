"""Several hosts for tests: network namespaces if available, otherwise ranks that act as separate hosts.

The namespaces are those of the benchmarks. Their file is loaded by its path: with the repository's root on sys.path,
tests would find the source tree instead of the installed package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Sequence

import pytest

from harness import launcher
from harness.script import MpiRun, Running

_NETWORK = Path(__file__).parents[2] / "benchmarks" / "network.py"


class Hosts:
    """Hosts that are up inside the ``with`` block."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._exit = contextlib.ExitStack()
        self.network = None  # benchmarks.network.Network, if there are namespaces
        self.why_virtual = ""  # why there are no namespaces

    def __enter__(self) -> Hosts:
        if not launcher.is_open_mpi():
            self.why_virtual = "only Open MPI's mpirun is told here how to reach network namespaces"
            return self
        module = network_module()
        self.why_virtual = module.unavailable()
        if not self.why_virtual:
            try:
                self.network = self._exit.enter_context(module.Network(self._most))
            except (OSError, subprocess.CalledProcessError) as error:
                self.why_virtual = f"network namespaces cannot be joined: {error}"
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def require_network(self) -> None:
        """Skip a test that needs a network."""
        if self.network is None:
            pytest.skip(self.why_virtual)

    def start(
        self, mpirun: MpiRun, per_host: Sequence[int], script, *arguments: str, by_node=False, env=None, options=()
    ) -> Running:
        """Start a script with this number of ranks on each host; `by_node` distributes them round-robin.

        `options`: further options of mpirun.

        Skips the test if virtual hosts cannot be divided like that.
        """
        ranks = sum(per_host)
        if self.network is None:
            if by_node or list(per_host) != _virtual(ranks, len(per_host)):
                pytest.skip(f"virtual hosts cannot be divided so: {self.why_virtual}")
            variables = {**(env or {}), "MYKV_VIRTUAL_HOSTS": str(len(per_host))}
            return mpirun.start(ranks, script, *arguments, env=variables, options=tuple(options))
        extra = (*options, *(("--map-by", "node") if by_node else ()))

        def command(program: list[str]) -> list[str]:
            return self.network.mpirun(launcher.mpirun_path(), per_host, program, extra)

        return mpirun.start(ranks, script, *arguments, env=env, command=command)

    def options(self, per_host: Sequence[int]) -> dict[str, int]:
        """Options of the core for a script that starts it without the package."""
        return {} if self.network is not None else {"virtual_hosts": len(per_host)}


def _virtual(ranks: int, hosts: int) -> list[int]:
    """The number of ranks on each virtual host."""
    places = [rank * hosts // ranks for rank in range(ranks)]
    return [places.count(host) for host in range(hosts)]


def network_module() -> ModuleType:
    """The file of the benchmarks."""
    spec = importlib.util.spec_from_file_location("mykv_benchmarks_network", _NETWORK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
