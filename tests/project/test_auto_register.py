"""The store in programs that do not import kvstore_plugin: mykvrun/auto_register.py and its .pth file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Sequence

import pytest
from harness.marks import long
from harness.support import IS_2

from mykvrun import auto_register

_ROOT = Path(__file__).resolve().parents[2]
_PTH = _ROOT / "mykvrun" / "mykv-auto-register.pth"

# As Python does when it starts: it runs the lines of the .pth files of site-packages.
_START = f"""
    import site, sys
    site.addsitedir({str(_PTH.parent)!r})
    import mxnet as mx
    assert "mpi4py" not in sys.modules and "kvstore_plugin" not in sys.modules, "import mxnet has imported more"
"""


# Without the hook MXNet cannot be imported with current numpy.
_OLD_NAMES = f"""
    import sys
    sys.path.insert(0, {str(_ROOT)!r})
    from mykvrun import numpy_for_mxnet
    numpy_for_mxnet.install()
"""

# Some of those in tests/store/test_names.py, each with another use first.
NEAR = ["MyKw", "mykv ", "mkv", "Kvstore_Plugin", *([] if IS_2 else ["Horovod", "byteps"])]


def _python(code: str, *options: str, arguments: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess:
    code = "\n".join(line[4:] if line.startswith("    ") else line for line in code.splitlines())
    environment = {**os.environ, **variables}
    command = [sys.executable, *options, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


_TRAINS = """
    class OwnTrainer(mx.gluon.Trainer):
        pass

    def trained(make):
        net = mx.gluon.nn.Dense(3, in_units=4)
        net.initialize(mx.init.Constant(0.5))
        trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="MyKV")
        array = mx.np.array if mx.__version__.startswith("2.") else mx.nd.array
        for _ in range(2):
            with mx.autograd.record():
                loss = net(array([[1.0 + rank] * 4])).sum()
            loss.backward()
            trainer.step(2)
        return net.weight.data().asnumpy()
"""


def test_stores_and_trainers_need_no_import(mpirun):
    result = mpirun(
        2,
        _START
        + """
    import os
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    """
        + _TRAINS
        + """
    import numpy as np
    weights = trained(OwnTrainer)
    import kvstore_plugin as mykv
    assert (mykv.rank(), mykv.size()) == (rank, 2)
    # Two steps with the gradients 1 and 2, a rate of 0.1, and a batch of 2.
    assert np.allclose(weights, 0.5 - 2 * 0.1 * (1 + 2) / 2), weights
    assert (trained(mx.gluon.Trainer) == weights).all(), "with the import the result is another one"
    print("trained")
    """,
    )
    assert result.code == 0 and result.stdout.count("trained") == 2, result.text
    assert "are reduced by copying" not in result.stderr, result.text


def test_store_and_module_need_no_import(mpirun):
    result = mpirun(
        2,
        _START
        + """
    if hasattr(mx, "mod"):
        import logging
        logging.basicConfig(level=logging.ERROR)
        data = mx.io.NDArrayIter(mx.nd.ones((8, 4)), mx.nd.zeros((8,)), batch_size=4)
        symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
        module = mx.mod.Module(symbol, context=mx.cpu())
        module.fit(data, kvstore="mykv", num_epoch=1)
        assert module._kvstore.num_workers == 2, module._kvstore
    else:
        assert mx.kv.create("mykv").num_workers == 2
    print("good")
    """,
    )
    assert result.code == 0 and result.stdout.count("good") == 2, result.text


def test_nothing_happens_until_the_name_is_used():
    done = _python(
        _START
        + """
    from mykvrun import auto_register
    watched = mx.gluon.Trainer.__init__
    mx.kv.create("local")
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    assert "kvstore_plugin" not in sys.modules and mx.gluon.Trainer.__init__ is watched
    assert type(mx.__loader__) is type(mx.__spec__.loader) and "mykv" not in type(mx.__loader__).__module__
    import warnings
    warnings.simplefilter("error", UserWarning)  # MXNet warns of a store that is registered twice
    import kvstore_plugin
    assert not auto_register._replaced and auto_register._finder not in sys.meta_path
    assert mx.kv.KVStoreBase.kv_registry["mykv"] is kvstore_plugin.MyKV
    """
    )
    assert done.returncode == 0 and "overriding" not in done.stderr, done.stderr


def _names_on_the_page():
    page = (_ROOT / "docs" / "architecture.md").read_text()
    section = page.split("\n### In programs that do not import the package\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.*?)`(?: \((MXNet .*?)\))? \|", section, re.MULTILINE)


def test_the_page_shows_what_is_replaced():
    shown = [f"mxnet.{name}" for name, _ in _names_on_the_page()]
    registry = f"mxnet.kvstore.base.KVStoreBase.kv_registry['{auto_register._NAME}']"
    calls = [".".join(filter(None, names)) for *names, _, _ in auto_register._CALLS]
    assert shown == [registry, *calls]


def test_nothing_else_is_replaced():
    done = _python(
        _OLD_NAMES
        + f"""
    import site, sys, types
    import mxnet as mx

    def held():
        found = {{}}
        for module in [one for name, one in sys.modules.items() if name.split(".")[0] == "mxnet"]:
            for name, value in list(vars(module).items() if isinstance(module, types.ModuleType) else ()):
                found[f"{{module.__name__}}.{{name}}"] = value
                if isinstance(value, type) and str(value.__module__).split(".")[0] == "mxnet":
                    of_class = f"{{value.__module__}}.{{value.__qualname__}}"
                    found.update({{f"{{of_class}}.{{key}}": one for key, one in list(vars(value).items())}})
        for name, kind in mx.kv.KVStoreBase.kv_registry.items():
            found[f"mxnet.kvstore.base.KVStoreBase.kv_registry[{{name!r}}]"] = kind
        return found

    before = held()
    sys.path.insert(0, {str(_ROOT)!r})
    from mykvrun import auto_register
    auto_register._watch()
    after = held()
    print(*sorted(name for name in after if after[name] is not before.get(name)), sep="\\n")
    """,
        MYKV_AUTO_REGISTER="0",
    )
    assert done.returncode == 0, done.stderr
    only_1 = "MXNet 1.9"
    expected = sorted(f"mxnet.{name}" for name, release in _names_on_the_page() if not (IS_2 and release == only_1))
    assert done.stdout.split() == expected


def test_an_import_of_the_package_before_mxnet_ends_it():
    done = _python(
        f"""
    import importlib.util, site, sys
    site.addsitedir({str(_PTH.parent)!r})
    assert importlib.util.find_spec("mxnet").origin.endswith("__init__.py") and "mxnet" not in sys.modules
    assert importlib.util.find_spec("no_such_module") is None
    import kvstore_plugin as mykv
    from mykvrun import auto_register
    import mxnet as mx
    assert not auto_register._replaced and mx.kv.KVStoreBase.kv_registry["mykv"] is mykv.MyKV
    """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name if name in ("MyKw", "Horovod") else long(name) for name in NEAR])
def test_a_name_that_can_only_mean_mykv_is_an_error_without_an_import(name):
    done = _python(
        _START
        + f"""
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    uses = [
        lambda: mx.gluon.Trainer(net.collect_params(), "sgd", kvstore={name!r}),
        lambda: mx.kvstore.create(name={name!r}),
        lambda: mx.kv.create({name!r}),
    ]
    turn = int(sys.argv[1])
    for use in uses[turn:] + uses[:turn]:  # each of them may be the first
        try:
            use()
        except ValueError as error:
            assert "Is 'mykv' meant" in str(error), error
            continue
        raise SystemExit("the name was taken without an error")
    """,
        arguments=[str(NEAR.index(name) % 3)],
    )
    assert done.returncode == 0, done.stderr


def test_names_of_other_stores_import_nothing():
    done = _python(
        _START
        + """
    mx.kv.KVStoreBase.kv_registry["mykv2"] = lambda: "another"
    assert mx.kv.create("MyKV2") == "another"
    assert [mx.kv.create(name).type for name in ("local", "device")] == ["local", "device"]
    assert mx.kv.create().type == "local"
    assert "kvstore_plugin" not in sys.modules
    """
    )
    assert done.returncode == 0, done.stderr


def _import_with(tmp_path, version: str, mxnet: str, then: str = "") -> subprocess.CompletedProcess:
    """A program that imports MXNet first, with stand-ins for numpy and MXNet."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "numpy" / "random.py").write_text("")
    (tmp_path / "mxnet.py").write_text(mxnet)
    return _python(
        f"""
    import sys
    sys.path[:0] = [{str(tmp_path)!r}, {str(_ROOT)!r}]
    exec(open({str(_PTH)!r}).read())
    assert "numpy" not in sys.modules
    import mxnet
    import numpy
    {then}
    """,
        "-I",
        "-S",
    )


_USES_OLD_NAMES = """
import numpy
import numpy.random as rnd
from distutils.version import LooseVersion
from numpy import PINF, bool as boolean
assert boolean is bool and PINF == float("inf") and LooseVersion(numpy.__version__) > LooseVersion("1.6.0")
def later():
    import numpy as np
    return np.NaN
"""


@pytest.mark.parametrize("version", ["1.24.4", "2.5.0"])
def test_mxnet_may_be_imported_first_with_a_numpy_that_lacks_names(tmp_path, version):
    then = "assert not {'bool', 'PINF', 'NaN'} & set(vars(numpy)) and mxnet.later() != mxnet.later()"
    done = _import_with(tmp_path, version, _USES_OLD_NAMES, then)
    assert done.returncode == 0, done.stderr


def test_an_old_numpy_stays_as_it_is(tmp_path):
    then = "assert mxnet.numpy is numpy and not hasattr(numpy, 'bool')"
    done = _import_with(tmp_path, "1.23.5", "import numpy", then)
    assert done.returncode == 0 or sys.version_info >= (3, 12), done.stderr


@pytest.mark.parametrize(
    "version, mxnet, last",
    [
        ("2.1.0", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1.26.4", "raise AttributeError('of MXNet')", "AttributeError: of MXNet"),
    ],
)
def test_other_errors_of_mxnet_stay_as_they_are(tmp_path, version, mxnet, last):
    done = _import_with(tmp_path, version, mxnet)
    assert done.stderr.splitlines()[-1] == last, done.stderr


def test_an_installation_that_cannot_be_imported_is_an_error_at_each_use():
    """MXNet would drop the name, and each worker would train alone."""
    done = _python(
        _START
        + """
    sys.modules["kvstore_plugin"] = None  # its import raises ImportError
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    uses = [lambda: mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="mykv"), lambda: mx.kv.create("mykv")]
    for use in uses * 2:
        try:
            use()
        except ImportError:
            continue
        raise SystemExit("the name was taken without an error")
    """
    )
    assert done.returncode == 0, done.stderr


def test_it_can_be_switched_off():
    done = _python(
        _OLD_NAMES
        + _START
        + """
    assert "mykv" not in mx.kv.KVStoreBase.kv_registry
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "mykvrun.auto_register"]
    """,
        MYKV_AUTO_REGISTER="0",
    )
    assert done.returncode == 0, done.stderr


def test_the_start_of_python_imports_nothing_else():
    done = _python(
        f"""
    import os, sys
    sys.path.insert(0, {str(_ROOT)!r})
    before = set(sys.modules)
    exec(open({str(_PTH)!r}).read())
    print(*sorted(set(sys.modules) - before))
    """,
        "-I",
        "-S",
    )
    assert done.stdout.split() == ["mykvrun", "mykvrun.auto_register"], done.stdout + done.stderr


@pytest.fixture
def built(tmp_path):
    """setuptools' build folder of Python files, which goes to site-packages."""
    folder = tmp_path / "lib"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, timeout=120)
    return folder


def test_what_is_built_has_the_file_where_python_looks_for_it(built):
    assert (built / _PTH.name).read_text() == "import mykvrun.auto_register\n"
    assert (built / "mykvrun" / "auto_register.py").is_file()
    assert (built / "kvstore_plugin" / "timeline" / "page.html").is_file()
