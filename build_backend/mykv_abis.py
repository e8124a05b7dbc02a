"""A core for each MPI ABI, for wheels: the variable MYKV_ABIS names the compiler wrapper of an MPI of each ABI.

    MYKV_ABIS="openmpi=/opt/openmpi/bin/mpicc mpich=/opt/mpich/bin/mpicc"

Programs that are compiled with the headers of an older MPI run with newer MPIs of the same ABI. So cores built with the
oldest headers of each ABI run on most machines. The cores have no RPATH: loader/mykv_core/ loads the core for the MPI
that mpi4py has loaded, and the linker takes the loaded library by its SONAME.

Units that include neither mpi.h nor pybind11 are compiled once for all cores. Units that need one of them are compiled
for each ABI, or for each Python. A unit that needs both is compiled for each pair.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict

from mykv_compile import (
    BuildCore,
    common_flags,
    compile_all,
    cxx_compiler,
    digest_of_sources,
    link,
    mpi_flags,
    python_flags,
    user_flags,
)
from mykv_mpi import BuildError, describe
from mykv_units import units_by_needs

# The SONAME of the library of each ABI.
SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


def wrappers() -> Dict[str, str]:
    """The compiler wrapper of each ABI that MYKV_ABIS names; empty if the variable is not set.

    Raises
    ------
    BuildError
        The variable names an ABI that is not known, or no wrapper.
    """
    found = {}
    for word in os.environ.get("MYKV_ABIS", "").split():
        abi, _, wrapper = word.partition("=")
        if abi not in SONAMES or not wrapper:
            raise BuildError(
                f"MYKV_ABIS has the word '{word}', which is not one of {', '.join(SONAMES)} with a compiler wrapper: "
                "set it as in MYKV_ABIS='openmpi=/opt/openmpi/bin/mpicc mpich=/opt/mpich/bin/mpicc'."
            )
        found[abi] = wrapper
    return found


class BuildCores(BuildCore):
    """setuptools' command build_ext for a wheel with a core for each ABI."""

    def build_extension(self, ext):
        root = Path("build/wheels/objects")
        root.mkdir(parents=True, exist_ok=True)
        with open(root / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # builds for several Pythons take turns
            units = units_by_needs(map(Path, ext.sources), Path("csrc"), root / "units")
            units[frozenset()].append(digest_of_sources(root))
            for abi, wrapper in wrappers().items():
                self._build_core(abi, wrapper, units, root)

    def _build_core(self, abi, wrapper, units, root):
        cxx = cxx_compiler()
        mpi = describe(wrapper, cxx)
        print(f"mykv: building for the ABI {abi} with {mpi.version} ({mpi.mpicc})", flush=True)
        made = []
        for needs, sources in units.items():
            folder = root / "-".join(
                ["common", *([abi] if "mpi" in needs else []), *([sys.implementation.cache_tag] * ("python" in needs))]
            )
            flags = common_flags(self.distribution)
            if "mpi" in needs:
                flags += [*mpi_flags(mpi, folder / "headers"), f'-DMYKV_MPI_ABI="{abi}"']
            if "python" in needs:
                flags += python_flags(folder / "headers")
            made += compile_all([*cxx, *flags, *user_flags()], sources, folder)
        target = self.target_of(abi)
        target.parent.mkdir(parents=True, exist_ok=True)
        link(cxx, made, mpi.link_flags, target)
        _check(target, SONAMES[abi], mpi.mpicc)

    def target_of(self, abi):
        """Path of the core for an ABI: next to loader/mykv_core/__init__.py."""
        return Path(self.build_lib) / "mykv_core" / ("mykv_core." + abi + Path(self.get_ext_filename("x")).name[1:])


def _check(core: Path, soname: str, mpicc: str) -> None:
    shown = subprocess.run(["readelf", "-d", str(core)], capture_output=True, text=True).stdout
    if f"[{soname}]" not in shown or "RPATH" in shown or "RUNPATH" in shown:
        raise BuildError(
            f"{core} does not need {soname}, or has an RPATH: name in MYKV_ABIS an MPI of that ABI, not {mpicc}, and "
            "leave -rpath out of LDFLAGS."
        )
