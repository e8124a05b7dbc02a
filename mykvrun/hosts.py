"""The hosts of a job."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

from .errors import LaunchError

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+\])(?::([0-9]{1,6}))?")
_SLOTS = re.compile(r"(\S+?)(?:\s+slots\s*=\s*([0-9]{1,6}))?(?:\s+max[-_]slots\s*=\s*[0-9]+)?")


class Host(NamedTuple):
    """A host and its number of workers."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Hosts in ``host1:4,host2:4``; a host without a number takes one worker.

    Raises
    ------
    LaunchError
        The text is not such a list, or names a host twice.
    """
    hosts = []
    for part in text.split(","):
        found = _HOST.fullmatch(part.strip())
        if not found or found.group(2) == "0":
            raise LaunchError(f"-H {text}: {part!r} is not HOST or HOST:WORKERS, such as node1:4.")
        hosts.append(Host(found.group(1), int(found.group(2) or 1)))
    return _without_repetition(hosts, f"-H {text}")


def read_hostfile(file: str) -> list[Host]:
    """Hosts in a file with a line for each: ``host slots=4`` as Open MPI and Horovod write it, or ``host:4`` as MPICH.

    A host without a number takes one worker; Open MPI's ``max-slots=8`` is ignored.

    Raises
    ------
    LaunchError
        The file cannot be read, names no host or a host twice, or has another line.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise LaunchError(f"The hostfile {file} cannot be read: {error}.") from None
    return parse_hostfile(data, file)


def parse_hostfile(data: bytes, file: str) -> list[Host]:
    """Hosts in the content of a hostfile. `file`: its name in errors. Otherwise like `read_hostfile`."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LaunchError(f"The hostfile {file} cannot be read: {error}.") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        words = _SLOTS.fullmatch(line)
        found = _HOST.fullmatch(words.group(1)) if words else None
        slots = int(words.group(2) or found.group(2) or 1) if words and found else 0
        if not found or not slots:
            raise LaunchError(f"The hostfile {file}, line {number}: {line!r} is not HOST slots=WORKERS.")
        hosts.append(Host(found.group(1), slots))
    if not hosts:
        raise LaunchError(f"The hostfile {file} names no host.")
    return _without_repetition(hosts, f"The hostfile {file}")


def _without_repetition(hosts: list[Host], where: str) -> list[Host]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise LaunchError(f"{where} names {twice} twice: give each host once, with all its workers.")
    return hosts


def is_this_host(name: str) -> bool:
    """Whether a name means this host."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", "[::1]", own, own.partition(".")[0])
