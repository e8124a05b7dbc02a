"""Every public name has an example in its docstring, and all examples run, on 1 and on 2 workers."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path

import kvstore_plugin
import pytest
from harness import launcher
from harness.marks import long
from harness.support import IS_2

_API = Path(__file__).parents[2] / "docs/reference/api.in"
_CLASSES = [name for name in kvstore_plugin.__all__ if inspect.isclass(getattr(kvstore_plugin, name))]

# Public members that a script does not call: MXNet or a trainer calls them, or they always raise an error.
_NOT_CALLED_BY_SCRIPTS = {
    "DistributedOptimizer": {"averages_gradients", "update", "update_multi_precision"},
    "LocalTrainer": {"allreduce_grads", "update"},
    "StatisticsHandler": {"batch_end"},
    "SyncBatchNorm": {"normalized"},
    "join": {"take_part"},
}
# MXNet 2.0 has other names, or no such part.
_ONLY_1 = {"allreduce_metric", "StatisticsHandler"}
# Examples that name the ranks 0 and 1. On one worker, [0] are all ranks, which need no process set of their own.
_ONLY_TWO_WORKERS = {"ProcessSet", "add_process_set", "alltoall", "recv", "remove_process_set", "send"}
_ONLY_ALONE = {"run"}  # a worker may start a job too, but two workers would start the same twice
_ELASTIC = {"ElasticState", "ElasticState.commit", "ElasticState.register_reset_callbacks", "run_elastic"}

_RUNNER = """
import doctest, json, os, sys
import kvstore_plugin
beginning, examples, compares = json.load(open(sys.argv[1]))
class Checker(doctest.OutputChecker):
    def check_output(self, want, got, flags):  # where an example shows no output, it may print
        return not (want and compares) or super().check_output(want, got, flags)


for name, text in examples:
    scope = {}
    exec(beginning, scope)
    code = doctest.DocTestParser().get_doctest(text, scope, name, None, None)
    failed, _ = doctest.DocTestRunner(Checker(), verbose=False).run(code, clear_globs=False)
    scope["mx"].nd.waitall()  # errors that no line has read are raised
    if failed:
        sys.stdout.flush()
        os._exit(1)  # at once: other workers may wait
    mykv = scope["mykv"]
    mykv.init()
    mykv.barrier()  # the other workers may still need this one
    if mykv.rank() == 0:
        print("ran", name, flush=True)
    mykv.shutdown()  # the next example begins without process sets and counters of this one
"""


def _members(name: str) -> dict[str, object]:
    """Methods, properties and values of a public class that a script may use."""
    public = {key: member for key, member in vars(getattr(kvstore_plugin, name)).items() if not key.startswith("_")}
    return {key: member for key, member in public.items() if key not in _NOT_CALLED_BY_SCRIPTS.get(name, ())}


def _docstrings_of_values() -> dict[str, str]:
    """The strings below assignments at the top of the package's modules, by the name that is assigned."""
    found = {}
    modules = [one for name, one in sorted(sys.modules.items()) if name.startswith("kvstore_plugin.")]
    for module in [one for one in modules if str(one.__file__).endswith(".py")]:  # not the compiled core
        body = ast.parse(inspect.getsource(module)).body
        for one, after in zip(body, body[1:]):
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            if (
                isinstance(targets[0], ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[targets[0].id] = inspect.cleandoc(str(after.value.value))
    return found


def _example(docstring: str | None) -> str:
    """The section `Examples` of a docstring; empty if there is none."""
    return (docstring or "").partition("\nExamples\n--------\n")[2]


def _examples() -> dict[str, str]:
    """The examples of all public names and of the members of public classes; empty where there is none."""
    values = _docstrings_of_values()
    found = {}
    for name in kvstore_plugin.__all__:
        value = getattr(kvstore_plugin, name)
        described = inspect.isclass(value) or inspect.isroutine(value)
        found[name] = _example(inspect.getdoc(value) if described else values.get(name))
    for name in _CLASSES:
        for key, member in _members(name).items():
            found[f"{name}.{key}"] = _example(inspect.getdoc(member))
    return found


_EXAMPLES = _examples()


@pytest.mark.parametrize("name", kvstore_plugin.__all__)
def test_public_names_have_examples(name):
    assert ">>>" in _EXAMPLES[name], f"{name} has no section Examples in its docstring"


@pytest.mark.parametrize("name", _CLASSES)
def test_public_members_have_examples(name):
    """A member has an example of its own, or the example of its class uses it."""
    for key in _members(name):
        shown = _EXAMPLES[f"{name}.{key}"] or re.search(rf"\.{key}\b", _EXAMPLES[name])
        assert shown, f"{name}.{key} has no example, and that of {name} does not use it"


def test_examples_are_short_and_use_public_names():
    for name, text in _EXAMPLES.items():
        lines = re.findall(r"^(?:>>>|\.\.\.) ", text, re.MULTILINE)
        assert len(lines) <= 10, f"the example of {name} has {len(lines)} lines"
        unknown = set(re.findall(r"\bmykv\.(\w+)", text)) - set(kvstore_plugin.__all__)
        assert not unknown, f"the example of {name} uses {unknown}"


@pytest.mark.parametrize("ranks", [long(1), 2])
def test_examples_run(mpirun, tmp_path, ranks):
    beginning = next(
        code
        for code in re.findall(r"^```python\n(.*?)^```$", _API.read_text(), re.MULTILINE | re.DOTALL)
        if "DistributedSampler" in code
    )
    elastic = launcher.is_open_mpi()
    left_out = set().union(
        _ONLY_1 if IS_2 else (), () if elastic else _ELASTIC, _ONLY_TWO_WORKERS if ranks == 1 else _ONLY_ALONE
    )
    chosen = [(name, text) for name, text in _EXAMPLES.items() if text and name not in left_out]
    examples = tmp_path / "examples.json"
    examples.write_text(json.dumps([beginning, chosen, ranks == 2]))
    options = ("--with-ft", "ulfm") if elastic else ()
    result = mpirun(ranks, _RUNNER, str(examples), timeout=150, cwd=str(tmp_path), options=options)
    assert result.code == 0, result.text
    assert re.findall(r"^ran (\S+)$", result.stdout, re.MULTILINE) == [name for name, _ in chosen], result.text
