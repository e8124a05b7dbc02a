"""Runs a part of the tests as on other machines.

``python tests/harness/machines.py [--only user] [for pytest]``. A machine means older instructions, another number of
threads, fewer rights, or less shared memory. Each variation is verified before it runs; unavailable ones are reported
with the reason. Exit status 1 if a test failed or nothing ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_SMALL_MEMORY = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
_PROBE = """
import mxnet as mx
from kvstore_plugin.world import core
one = mx.nd.ones((1, 1, 3, 3))
mx.nd.Convolution(one, one, kernel=(3, 3), num_filter=1, no_bias=True).wait_to_read()
print("kernels", core.load().select_kernel_path({kernels!r}))
"""


@dataclasses.dataclass
class Variation:
    """One machine.

    Attributes
    ----------
    part : str
        Selection for pytest's -m.
    env : dict
        Its variables.
    isa : str
        The processor's name in oneDNN then; empty for any.
    wrappers : dict
        Prefixes of pytest's command line, by name; each is a fallback for the previous one.
    """

    part: str
    env: dict[str, str]
    isa: str = ""
    wrappers: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {"": []})


def _instructions(onednn: str, blas: str, kernels: str) -> dict[str, str]:
    # Both releases of MXNet read DNNL_MAX_CPU_ISA, and only 2.0.0b1 ONEDNN_MAX_CPU_ISA.
    return {"DNNL_MAX_CPU_ISA": onednn, "OPENBLAS_CORETYPE": blas, "MYKV_KERNELS": kernels}


def _variations(home: str) -> dict[str, Variation]:
    user = ["--reuid=65534", "--regid=65534", "--clear-groups", "env", f"HOME={home}", f"TMPDIR={home}"]
    return {
        "avx2": Variation(
            "smoke or numeric",
            {**_instructions("AVX2", "Haswell", "avx2"), "MYKV_TEST_THREADS": "unset"},
            "Intel AVX2",
        ),
        "sse4.1": Variation(
            "smoke or numeric",
            {**_instructions("SSE41", "Nehalem", "generic"), "MYKV_TEST_SM_DIRECTORY": "/dev/shm"},
            "Intel SSE4.1",
            {
                "with 64 MB in /dev/shm": ["unshare", "--mount", "sh", "-c", _SMALL_MEMORY, "sh"],
                "with /dev/shm as it is": [],
            },
        ),
        # In a user namespace if the environment is in a folder that only root can read.
        "user": Variation(
            "smoke or rights",
            {},
            "",
            {
                "as user 65534": ["setpriv", *user],
                "as a user in a namespace": ["unshare", "--user", "--map-user=65534", "--map-group=65534", *user[3:]],
            },
        ),
    }


def main() -> int:
    """Run the variations on the command line, and print which of them ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of variations, with commas between them")
    given, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="mykv-machines-") as home:
        os.chmod(home, 0o777)  # a user's home
        variations = _variations(home)
        names = given.only.split(",") if given.only else list(variations)
        said = {name: _try(name, variations[name], arguments) for name in names}
    print("\n".join(f"{name:<8}{text}" for name, (_, text) in said.items()))
    codes = [code for code, _ in said.values() if code is not None]
    return 1 if any(codes) or not codes else 0


def _try(name: str, variation: Variation, arguments: list[str]) -> tuple[int | None, str]:
    """Exit code of pytest and a line about it; no code if this machine is not available."""
    reasons = []
    for words, wrapper in variation.wrappers.items():
        why_not = _why_not(wrapper, variation)
        if not why_not:
            break
        reasons.append(f"not {words}: {why_not}" if words else why_not)
    else:
        return None, f"could not run here: {'; '.join(reasons)}"
    begin = time.monotonic()
    command = [
        *wrapper,
        sys.executable,
        "-m",
        "pytest",
        str(_TESTS),
        "-m",
        f"({variation.part}) and not long",
        "-p",
        "no:cacheprovider",
    ]
    print(
        f"\n== {name}: {' '.join(f'{key}={value}' for key, value in variation.env.items())} {' '.join(command)}",
        flush=True,
    )
    code = subprocess.run([*command, *arguments], env={**os.environ, **variation.env}).returncode
    result = f"{'passed' if code == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s"
    return code, "; ".join(filter(None, [result, words, *reasons]))


def _why_not(wrapper: list[str], variation: Variation) -> str:
    """Why a variation cannot run in this wrapper; empty: it can."""
    kernels = variation.env.get("MYKV_KERNELS", "generic")
    command = [*wrapper, sys.executable, "-c", _PROBE.format(kernels=kernels)]
    env = {**os.environ, **variation.env, "DNNL_VERBOSE": "1"}
    try:
        probe = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if probe.returncode != 0:
        return (probe.stderr.strip() or "it failed").splitlines()[-1]
    isa = re.search(r"info,cpu,isa:(.*)", probe.stdout)
    if variation.isa and (isa is None or isa.group(1) != variation.isa):
        return f"oneDNN says {isa.group(1) if isa else 'nothing'} and not {variation.isa}"
    if "kernels True" not in probe.stdout:
        return f"this processor has no {kernels} kernels"
    return ""


if __name__ == "__main__":
    sys.exit(main())
