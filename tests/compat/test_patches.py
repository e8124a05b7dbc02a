"""What is replaced in MXNet is in one table, is in place when the table says, and is replaced nowhere else."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import kvstore_plugin
import pytest
from harness.support import IS_2, mx
from kvstore_plugin.compat import patches

_PACKAGE = Path(kvstore_plugin.__file__).parent
_PAGE = Path(__file__).parents[2] / "docs/reference/mxnet.md"
_TEXTS = {"why": "a reason", "does": "something", "undone_by": "nothing"}


# ---- the page


def _row(patch):
    release = {(1,): " (MXNet 1.9)", (2,): " (MXNet 2.0)", (1, 2): ""}[patch.releases]
    cells = (f"`{patch.owner}.{patch.name}`{release}", patch.why, patch.does, patch.when, patch.undone_by)
    return f"| {' | '.join(cells)} |"


def test_the_page_shows_the_table():
    shown = [line for line in _PAGE.read_text().splitlines() if line.startswith("|")][2:]
    expected = [_row(patch) for patch in patches.table()]
    missing, unknown = set(expected) - set(shown), set(shown) - set(expected)
    assert not missing and not unknown, "\n".join(["missing:", *sorted(missing), "unknown:", *sorted(unknown)])
    assert shown == expected


def test_every_replacement_says_what_it_is():
    for patch in patches.table():
        assert patch.why and patch.does and patch.undone_by, patch
        assert patch.when in (patches.AT_IMPORT, patches.AT_INIT), patch
        assert patch.releases and set(patch.releases) <= {1, 2}, patch


# ---- what is in place, and when

_LOOK = """
import importlib, json, logging, sys, types, warnings
from mykvrun import numpy_for_mxnet

numpy_for_mxnet.install()
import mxnet as mx

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
mx.base._LIB.MXAutogradSetIsRecording  # a library has its functions as attributes once they were looked up
looked_up = type(mx.base._LIB.MXAutogradSetIsRecording)


def attributes():
    found = {}
    for module in [one for name, one in sys.modules.items() if name.split(".")[0] == "mxnet"]:
        for name, value in list(vars(module).items() if isinstance(module, types.ModuleType) else ()):
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and str(value.__module__).split(".")[0] == "mxnet":
                path = f"{value.__module__}.{value.__qualname__}"
                found.update({f"{path}.{key}": held for key, held in list(vars(value).items())})
    found.update({f"mxnet.base._LIB.{name}": value for name, value in vars(mx.base._LIB).items()})
    return found


def changed(before):
    after = attributes()
    names = [one for one in before.keys() | after.keys() if before.get(one) is not after.get(one)]
    return sorted(one for one in names if one in before or not isinstance(after[one], looked_up))


seen = {}
bare = attributes()
import kvstore_plugin as mykv
seen["import"] = changed(bare)
mykv.init()
seen["init"] = changed(bare)
before = attributes()
from kvstore_plugin.compat import patches
for name in sorted({patch.replacement.__module__ for patch in patches.table()}):
    importlib.reload(sys.modules[name])
patches.install()
seen["reloaded"] = changed(before)
mykv.shutdown()
patches.undo()
seen["undone"] = changed(bare)
patches.install()
before = attributes()
for name in [name for name in sys.modules if name.split(".")[0] == "kvstore_plugin"]:
    del sys.modules[name]
import kvstore_plugin.compat.patches
kvstore_plugin.compat.patches.install()
seen["second import"] = changed(before)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen():
    """What differs in MXNet from what it was in a fresh process, by the moment."""
    # An installation waits for the name of the store in MXNet's classes, until the package is imported.
    environment = {**os.environ, "MYKV_AUTO_REGISTER": "0"}
    ran = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=150, env=environment)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def _paths(patches_):
    """Names as modules and classes have them themselves, such as mxnet.gluon.parameter.Parameter.data."""
    paths = []
    for patch in [one for one in patches_ if (2 if IS_2 else 1) in one.releases]:
        owner = mx
        for name in patch.owner.split("."):
            owner = getattr(owner, name)
        if isinstance(owner, type):
            paths.append(f"{owner.__module__}.{owner.__qualname__}.{patch.name}")
        else:
            paths.append(f"{getattr(owner, '__name__', 'mxnet.' + patch.owner)}.{patch.name}")
    return sorted(paths)


def test_import_replaces_what_cannot_wait_and_init_the_rest(seen):
    at_import = [patch for patch in patches.table() if patch.when == patches.AT_IMPORT]
    assert seen["import"] == _paths(at_import)
    assert seen["init"] == _paths(patches.table())


def test_nothing_is_replaced_twice(seen):
    assert seen["reloaded"] == []
    assert not set(seen["second import"]) & set(_paths(patches.table()))


def test_undo_gives_back_everything(seen):
    assert seen["undone"] == []


# ---- what cannot wait: a program may use it before any code of this package runs

_BEFORE_INIT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from harness.support import *
from kvstore_plugin.gradients import bucket_memory
from mpi4py import MPI
from mxnet import autograd, gluon
try:
    from mxnet import amp
except ImportError:
    from mxnet.contrib import amp

rank = MPI.COMM_WORLD.Get_rank()
batch = array(numbers(rank, (4, 6)))


def backward(net):
    with autograd.record():
        loss = net(batch).sum()
    loss.backward()


def by_name(**options):
    net = dense_network(rank)
    return net, gluon.Trainer(net.collect_params(), "sgd", {{"momentum": 0.9}}, kvstore="mykv", **options)


def failure(call, *arguments):
    try:
        call(*arguments)
        mx.nd.waitall()
    except Exception as error:
        clear_errors()
        return str(error).strip().splitlines()[-1]


def in_buckets(net):
    return [bucket_memory._bucket_of(p) is not None for p in structure(net).values()]


"""

_TRAINERS = """
used, cast = dense_network(1), dense_network(2)
for one in (used, cast):
    backward(one)
assert not mykv.is_initialized()
(wrong, stepped), (net, loaded), (filled, with_values) = [by_name(update_on_kvstore=False) for _ in range(3)]
scaled = by_name(update_on_kvstore=True)[1]
amp.amp._amp_initialized = amp.amp._amp_loss_scale_initialized = True
print("AMP", failure(amp.init_trainer, scaled))
directory = sys.argv[0] + f".{rank}"
if rank == 1:
    other = gluon.Trainer(dense_network(0).collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)
    other.save_states(directory)
    loaded.load_states(directory)
    dense_network(5).save_parameters(directory)
    filled.load_parameters(directory)
for one in (wrong, net, filled):
    backward(one)
cast.cast("float64")
fresh = dense_network(3)
assert in_buckets(net) == in_buckets(wrong) == [True] * 6

print("step", failure(stepped.step, "4" if rank else 4))
assert mykv.integrations.gluon_trainer.was_attached(stepped)
print("states", failure(loaded.step, 4))
print("parameters", failure(with_values.step, 4))
for made in (used, fresh, cast):
    trainer = mykv.DistributedTrainer(made.collect_params(), "sgd")
    assert in_buckets(made) == [True] * 6, (made, in_buckets(made))
print("done")
"""

_MODULE = """
x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="one")
module = mx.mod.Module(mx.sym.SoftmaxOutput(x, name="softmax"))
module.bind([("data", (4, 6))], [("softmax_label", (4,))])
module.init_params()
settings = {"rescale_grad": 1.0 + rank}
print("factors", failure(lambda: module.init_optimizer(kvstore="mykv", optimizer_params=settings)))
print("type", module._kvstore.type)
"""


def _lines(result, word):
    """What the two ranks have printed behind a word."""
    assert result.code == 0, result.text
    lines = re.findall(rf"^{word} (.*)$", result.stdout, re.MULTILINE)
    assert len(lines) == 2, result.text
    return lines


def test_trainers_made_before_init_call_init(mpirun):
    result = mpirun(2, _BEFORE_INIT + _TRAINERS)
    for line in _lines(result, "AMP"):
        assert "AMP does not work with a gluon.Trainer that has update_on_kvstore=True" in line
    for line in _lines(result, "step"):
        assert "unsupported operand" in line, result.text
    for word in ("states", "parameters"):
        for line in _lines(result, word):
            assert "load_states" in line, result.text


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
def test_modules_made_before_init_compare_their_factors(mpirun):
    result = mpirun(2, _BEFORE_INIT + _MODULE)
    for line in _lines(result, "factors"):
        assert "rescale_grad must be the same on all workers" in line, result.text
    assert _lines(result, "type") == ["dist_sync_mykv"] * 2


# ---- the decorator


@pytest.fixture
def mxnet(monkeypatch):
    """A stand-in for MXNet, and an empty table."""

    class Base:
        def inherited(self):
            return "base"

    class Layer(Base):
        def forward(self, x):
            """MXNet's own."""
            return x + 1

    stand_in = types.SimpleNamespace(nn=types.SimpleNamespace(Layer=Layer))
    monkeypatch.setattr(patches, "mx", stand_in)
    monkeypatch.setattr(patches, "MAJOR", 1)
    monkeypatch.setattr(patches, "_table", {})
    monkeypatch.setattr(patches, "_owners", {})
    monkeypatch.setattr(patches, "_replaced", [])
    return stand_in


def test_a_replacement_calls_the_original_and_looks_like_it(mxnet):
    own = mxnet.nn.Layer.forward

    @patches.replaces("nn.Layer.forward", **_TEXTS)
    def _forward(original, self, x):
        return 10 * original(self, x)

    assert mxnet.nn.Layer().forward(1) == 20 and _forward(own, None, 2) == 30
    assert mxnet.nn.Layer.forward.__doc__ == "MXNet's own." and mxnet.nn.Layer.forward.__wrapped__ is own
    patches.replaces("nn.Layer.forward", **_TEXTS)(_forward)
    patches.install()
    assert mxnet.nn.Layer().forward(1) == 20 and len(patches.table()) == 1
    patches.undo()
    assert mxnet.nn.Layer.forward is own


def test_a_name_that_a_program_has_given_to_something_else_before_init(mxnet):
    own, original = mxnet.nn.Layer, mxnet.nn.Layer.forward
    patches.replaces("nn.Layer.forward", when=patches.AT_INIT, **_TEXTS)(lambda original, self, x: -1)
    mxnet.nn.Layer = functools.partial(own)
    patches.install()
    assert own().forward(1) == -1 and mxnet.nn.Layer().forward(1) == -1
    patches.undo()
    assert own.forward is original


def test_what_waits_and_what_is_for_another_release(mxnet):
    own = dict(vars(mxnet.nn.Layer))
    register = patches.replaces("nn.Layer.forward", when=patches.AT_INIT, **_TEXTS)
    register(lambda original, self, x: -1)
    patches.replaces("nn.Layer.absent", releases=(2,), **_TEXTS)(lambda original: None)
    assert dict(vars(mxnet.nn.Layer)) == own
    patches.install()
    assert mxnet.nn.Layer().forward(1) == -1 and not hasattr(mxnet.nn.Layer, "absent")
    assert [patch.name for patch in patches.table()] == ["absent", "forward"]


def test_what_mxnet_does_not_have_itself_is_taken_away_again(mxnet):
    class Made:
        original = "not looked at"

        def __get__(self, layer, owner):
            return self if layer is None else self.original

    @patches.replaces("nn.Layer.made", makes=True, **_TEXTS)
    def _made(original):
        made = Made()
        made.original = original
        return made

    patches.replaces("nn.Layer.inherited", **_TEXTS)(lambda original, self: original(self) + "!")
    assert mxnet.nn.Layer().made is None and mxnet.nn.Layer().inherited() == "base!"
    patches.undo()
    assert not {"made", "inherited"} & set(vars(mxnet.nn.Layer)) and mxnet.nn.Layer().inherited() == "base"


def test_mistakes_in_the_table_are_errors(mxnet):
    def one(original, self, x):
        return 1

    def other(original, self, x):
        return 2

    patches.replaces("nn.Layer.forward", **_TEXTS)(one)
    with pytest.raises(ValueError, match="nn.Layer.forward is replaced by .*one and by .*other"):
        patches.replaces("nn.Layer.forward", **_TEXTS)(other)
    with pytest.raises(AttributeError, match="absent"):
        patches.replaces("nn.Layer.absent", **_TEXTS)(one)


# ---- nothing else in the package assigns to what is MXNet's


def _mxnet_names(tree):
    """Names of a module that stand for MXNet, its modules, classes and libraries: imported, or attributes of such."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"(\w+\.)*mxnet\b", node.module or ""):
            names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {one.asname or one.name.split(".")[0] for one in node.names if one.name.split(".")[0] == "mxnet"}
    grown = True
    while grown:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _is_mxnets(node.value, names):
                names |= {one.id for target in node.targets for one in _parts(target) if isinstance(one, ast.Name)}
            elif isinstance(node, (ast.For, ast.comprehension)) and _is_mxnets(node.iter, names):
                names |= {one.id for one in _parts(node.target) if isinstance(one, ast.Name)}
        grown = len(names) > before
    return names


def _parts(target):
    return target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _is_mxnets(node, names):
    """Whether an expression is MXNet's, or a choice or tuple of what is."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return _is_mxnets(node.value, names)
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_is_mxnets(one, names) for one in node.elts)
    if isinstance(node, ast.IfExp):
        return _is_mxnets(node.body, names) or _is_mxnets(node.orelse, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "vars", "type"):
        return node.func.id == "type" or _is_mxnets(node.args[0], names)
    return isinstance(node, ast.Subscript) and _is_mxnets(node.value, names)


def _assignments(source):
    """Lines in which a module sets or deletes an attribute of what is MXNet's, or of the type of an object."""
    tree = ast.parse(source)
    names = _mxnet_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            is_class = isinstance(node.value, ast.Attribute) and node.value.attr == "__class__"
            if is_class or _is_mxnets(node.value, names):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "delattr"):
            target = node.args[0]
            if _is_mxnets(target, names) or ast.unparse(target).endswith("__class__"):
                yield node.lineno, ast.unparse(node)


@pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse is new in Python 3.9")
def test_no_other_module_assigns_to_what_is_mxnets():
    found = {
        f"{path.relative_to(_PACKAGE)}:{line}: {text}"
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path != _PACKAGE / "compat" / "patches.py"
        for line, text in _assignments(path.read_text())
    }
    assert found == set()


@pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse is new in Python 3.9")
@pytest.mark.parametrize(
    "planted",
    [
        "from ..compat.mxnet import gluon\ngluon.Trainer.step = 1",
        "from .mxnet import Parameter as P\nP.data: int = 1",
        "from ..compat.mxnet import gluon\nsetattr(gluon.Trainer, 'step', 1)",
        "from ..compat.mxnet import mx\nfor place in (mx.model, mx.mod.module):\n    place._create_kvstore = 1",
        "import mxnet.model\nlibrary = mxnet.base._LIB\nlibrary.MXAutogradSetIsRecording = 1",
        "from ..compat import mxnet\nholder = mxnet.mx if 1 else 0\ndel holder.dlpack",
        "from ..compat.mxnet import mx\nvars(mx.model)['_create_kvstore'] = 1",
        "from ..compat.mxnet import Parameter\nfor kind, name in ((Parameter, 'cast'),):\n    setattr(kind, name, 1)",
        "type(trainer).step = 1",
        "setattr(trainer.__class__, 'step', 1)",
    ],
)
def test_the_scan_finds_assignments(planted):
    assert len(list(_assignments(planted))) == 1


def test_the_scan_leaves_objects_alone():
    harmless = (
        "from ..compat.mxnet import gluon\ntrainer = gluon.Trainer([], 'sgd')\ntrainer._scale = 1\nself.mx = gluon"
    )
    assert list(_assignments(harmless)) == []
