"""Runs test_mxnet_on_gpu.py without a GPU, with an MXNet that is built for CUDA: ``make test-mxnet-cuda``.

Stand-ins take the place of every library of CUDA's that MXNet was linked with (tests/standin). Those of libcudart and
libnccl have what MXNet needs more in tests/standin/mxnet_cuda. The functions of libraries that only compute, such as
libcublas, do nothing. MXNet's engine, its memory and its copies are the real ones. Arguments go to pytest.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_STANDIN = Path(__file__).parents[1] / "standin"
_CUDA, _DRIVER, _NVRTC, _NCCL = "libcudart.so.11.0", "libcuda.so.1", "libnvrtc.so.11.2", "libnccl.so.2"
_TEST = Path(__file__).with_name("test_mxnet_on_gpu.py")
_COMPILER = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared", "-ldl"]
# cudnnGetVersion is compared with the version that MXNet was compiled with.
_ANSWERS = {"cudnnGetVersion": 8101}


def main() -> None:
    """Build the stand-ins, then run the test with 1, 2 and 8 GPUs."""
    folder = Path(importlib.util.find_spec("mxnet").submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as place:
        libraries = Path(place)
        _build(libraries, _undefined(folder / "libmxnet.so"))
        for gpus in (1, 2, 8):
            print(f"{gpus} GPUs:", flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", str(_TEST), *sys.argv[1:]], env=_environment(libraries, gpus)
            )
            if done.returncode:
                sys.exit(done.returncode)


def _environment(libraries: Path, gpus: int) -> dict[str, str]:
    cuda = str(libraries / _CUDA)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "MYKV_TEST_GPU": "1",
        "MYKV_CUDA_LIBRARY": cuda,
        "MYKV_NCCL_LIBRARY": str(libraries / _NCCL),
        "STANDIN_CUDART": cuda,
        "STANDIN_CUDA_VERSION": "11020",
        "STANDIN_DEVICES": str(gpus),
    }


def _undefined(library: Path) -> dict[str, set[str]]:
    """The functions that a library takes from others, by the version that names their library; '' for those without."""
    table = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    found: dict[str, set[str]] = defaultdict(set)
    for line in table.stdout.splitlines():
        name, _, version = line.split()[-1].partition("@")
        found[version.strip("@")].add(name)
    return found


def _build(libraries: Path, undefined: dict[str, set[str]]) -> None:
    more = _STANDIN / "mxnet_cuda"
    _link(libraries, _CUDA, [*sorted(_STANDIN.glob("cudart*.cpp")), more / "runtime.cpp"], undefined[_CUDA])
    _link(libraries, _DRIVER, [more / "driver.cpp", libraries / _CUDA])
    _link(libraries, _NVRTC, [more / "nvrtc.cpp"], undefined[_NVRTC])
    _link(libraries, _NCCL, [*sorted(_STANDIN.glob("nccl*.cpp")), _empty(libraries, {"ncclBcast", "ncclCommInitAll"})])
    for name in undefined:
        if name.startswith("lib") and not (libraries / name).exists() and name[3:5] in ("cu", "nv"):
            _link(libraries, name, [_empty(libraries, undefined[name])], undefined[name])


def _empty(libraries: Path, functions: set[str]) -> Path:
    """A source of functions that do nothing and return 0, as the libraries' own do where all is well."""
    source = libraries / "empty.cpp"
    visible = 'extern "C" __attribute__((visibility("default")))'
    lines = [f"{visible} long {name}(...) {{ return {_ANSWERS.get(name, 0)}; }}\n" for name in sorted(functions)]
    source.write_text("".join(lines))
    return source


def _link(libraries: Path, name: str, sources: list[Path], versioned: set[str] | None = None) -> None:
    """Compile a library; the functions `versioned` have its name as their version."""
    options = [f"-Wl,-soname,{name},-z,nodelete"]
    if versioned:
        script = libraries / "versions"
        script.write_text(f"{name} {{ global: {' '.join(f'{one};' for one in sorted(versioned))} }};\n")
        options.append(f"-Wl,--version-script={script}")
    subprocess.run([*_COMPILER, *map(str, sources), "-o", str(libraries / name), *options], check=True)


if __name__ == "__main__":
    main()
