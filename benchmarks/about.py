"""The machine, the versions and the commands of a run, for the page with its results."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from typing import Any

from . import environments, launch
from .runner import Item


def collect(wanted: list[str]) -> dict[str, Any]:
    """The machine and the versions; if 'horovod' is needed, also those of its environment."""
    versions = {"ours": _versions(environments.our_python())}
    if "horovod" in wanted:
        versions["horovod"] = _versions(environments.horovod_python())
    return {"machine": _machine(), "versions": versions, "peers": wanted, "commit": _commit()}


def commands(plan: list[Item]) -> list[str]:
    """The command of each setup, without paths; JOB.json holds the cases."""
    shown = {}
    for item in plan:
        title = f"{item.setup.title}, {item.ranks} ranks"
        shown.setdefault(title, launch.described(item.setup, item.ranks))
    return [f"{title}: {command}" for title, command in shown.items()]


def _versions(python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, launch.WORKER, "versions"], capture_output=True, text=True, check=False, timeout=60, cwd=os.sep
    )
    if done.returncode != 0:
        raise RuntimeError(f"{python} cannot say its versions: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _machine() -> dict[str, str]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = re.search(r"model name\s*: (.*)", file.read())
    with open("/proc/meminfo", encoding="utf-8") as file:
        total = int(file.readline().split()[1]) / 2**20
    return {
        "processor": model.group(1) if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": _caches(),
        "memory": f"{total:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "huge pages for shared memory": _chosen_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _caches() -> str:
    found = {}
    base = "/sys/devices/system/cpu/cpu0/cache"
    for index in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        if index.startswith("index"):
            level, kind, size = (_read(f"{base}/{index}/{name}") for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[level] = f"L{level} {size}"
    return ", ".join(found.values()) or "unknown"


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _chosen_word(path: str) -> str:
    return re.sub(r".*\[(.*)\].*", r"\1", _read(path)) if os.path.exists(path) else "unknown"


def _commit() -> str:
    """The commit of the measured code; changed pages, perhaps from an earlier run, do not count."""
    commit = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(environments.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
