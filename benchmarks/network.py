"""Several hosts on one machine, to measure and test network traffic: ``with Network(2, "1gbit") as network``.

Each host is a network namespace with its own name and address; a bridge joins them, and a token bucket filter
holds each link to a rate. Needs root, iproute2, and the mpirun of Open MPI 5, MPICH or Intel MPI. Memory and cores are
shared by all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Sequence

# Interface names have at most 15 characters, and must differ from those of other runs.
_NAME = f"mkb{os.getpid() % 100000}"
_SUBNET = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"

# Replaces ssh for mpirun: AGENT [-OPTION...] ADDRESS COMMAND...
_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
address=$1
shift
exec {self} "${{address##*.}}" "$*"
"""
_ENTER = """#!/bin/bash
name={name}h$1
shift
exec ip netns exec "$name" unshare --uts bash -c "hostname $name; $*"
"""


def unavailable() -> str:
    """Why such hosts cannot be created here; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2, util-linux) are missing"
    probe = subprocess.run(["ip", "netns", "add", f"{_NAME}probe"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{_NAME}probe"], check=False)
    return ""


class Network:
    """Hosts 1 to `hosts`, up inside the ``with`` block.

    Parameters
    ----------
    hosts : int
    rate : str
        Of each link and direction, as tc writes it; empty for an unlimited one.
    """

    def __init__(self, hosts: int, rate: str = "") -> None:
        self.hosts = hosts
        self.rate = rate
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def title(self) -> str:
        """Number of hosts and rate, as in tables."""
        return f"{self.hosts} hosts, {self.rate or 'unlimited'}"

    def __enter__(self) -> Network:
        self._folder = tempfile.TemporaryDirectory(prefix="mykv-network-")
        enter, agent = Path(self._folder.name, "enter"), Path(self._folder.name, "agent")
        enter.write_text(_ENTER.format(name=_NAME), encoding="ascii")
        agent.write_text(_AGENT.format(self=shlex.quote(str(enter))), encoding="ascii")
        for script in (enter, agent):
            script.chmod(0o755)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip(f"link add {_NAME}br type bridge")
        _ip(f"link set {_NAME}br up")
        for host in range(1, self.hosts + 1):
            space, link = f"{_NAME}h{host}", f"{_NAME}v{host}"
            _ip(f"netns add {space}")
            _ip(f"link add {link} type veth peer name eth0 netns {space}")
            _ip(f"link set {link} master {_NAME}br up")
            _ip(f"-n {space} addr add {self.address(host)}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")
            if self.rate:
                limit = f"qdisc add dev eth0 root tbf rate {self.rate} burst 256k latency 50ms"
                subprocess.run(["tc", "-n", space, *limit.split()], check=True)

    def __exit__(self, *_: object) -> None:
        for host in range(1, self.hosts + 1):
            for command in (f"link del {_NAME}v{host}", f"netns del {_NAME}h{host}"):
                subprocess.run(["ip", *command.split()], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{_NAME}br"], capture_output=True, check=False)
        if self._folder is not None:
            self._folder.cleanup()

    def address(self, host: int) -> str:
        """Address of a host; hosts count from 1."""
        return f"{_SUBNET}.{host}"

    def set_link(self, host: int, up: bool) -> None:
        """Connect or disconnect a host's link; hosts count from 1."""
        _ip(f"link set {_NAME}v{host} {'up' if up else 'down'}")

    def inside(self, host: int, words: Sequence[str]) -> list[str]:
        """The command line that runs a program on a host."""
        return [self._script("enter"), str(host), shlex.join(words)]

    def mpirun(
        self, mpirun: str, per_host: Sequence[int], words: Sequence[str], extra: Sequence[str] = ()
    ) -> list[str]:
        """The command line that starts a program in some ranks on each host; `extra` are options of mpirun."""
        hosts = [f"{self.address(host + 1)}:{ranks}" for host, ranks in enumerate(per_host)]
        options = self._open_mpi(hosts) if _is_open_mpi(mpirun) else self._hydra(hosts)
        return self.inside(1, [mpirun, "-n", str(sum(per_host)), *options, *extra, *words])

    def variables(self) -> dict[str, str]:
        """Variables by which Open MPI's mpirun, started on a host, reaches the other hosts."""
        prefixes = {"--prtemca": "PRTE_MCA_", "--mca": "OMPI_MCA_"}
        return {f"{prefixes[option]}{name}": value for option, name, value in self._settings()}

    def _settings(self) -> list[tuple[str, str, str]]:
        """Open MPI's settings for these hosts: the option of mpirun, name and value."""
        agent = {"plm_ssh_agent": self._script("agent"), "plm_ssh_no_tree_spawn": "1"}
        network = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": f"{_SUBNET}.0/24"}
        of_both = {"--prtemca": agent, "--mca": network}
        return [(option, name, value) for option, given in of_both.items() for name, value in given.items()]

    def _open_mpi(self, hosts: list[str]) -> list[str]:
        settings = [word for setting in self._settings() for word in setting]
        return [*settings, "--host", ",".join(hosts), "--oversubscribe", "--bind-to", "none"]

    def _hydra(self, hosts: list[str]) -> list[str]:
        """Options for the launchers of MPICH and Intel MPI, which read each host's ranks only from a file."""
        file = Path(self._script("machines"))
        file.write_text("".join(f"{host}\n" for host in hosts), encoding="ascii")
        names = ["-iface", "eth0", "-localhost", self.address(1)]  # hosts do not know each other's names
        return ["-launcher", "ssh", "-launcher-exec", self._script("agent"), *names, "-machinefile", str(file)]

    def _script(self, name: str) -> str:
        if self._folder is None:
            raise RuntimeError("The hosts are not up.")
        return str(Path(self._folder.name, name))


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return "Open MPI" in version


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
