"""Repeated parts of pages are the same text, and code on the pages runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import launcher
from harness.marks import long
from harness.support import IS_2, why_no_layers_in_bfloat16
from kvstore_plugin.timeline.recording import read

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PROGRAM = (_ROOT / "examples/train.py").read_text()
_SHOWN = ["README.md", "docs/get-started.md"]  # where the output of the program is


class _Page(NamedTuple):
    """How the code of a page is run, and the expected output."""

    output: str  # a regular expression
    only_1: bool = True  # blocks of MXNet 2.0 do not take its arrays
    old_names: bool = False  # the page says which names MXNet 2.0 has in place of those of 1.9.1
    hosts: int = 1
    options: tuple[str, ...] = ()  # of mpirun
    more: str = ""  # code after that of the page


# Pages whose blocks of Python, in their order, are one program for two workers. Fragments, or code that needs more than
# MXNet, begin with "``` py" instead. The pages on migration have tests of their own (test_docs.py).
_SAME_WEIGHTS = "mykv.check_in_step(net.collect_params())\n"
_PROGRAMS = {
    "backward.md": _Page(r"rank 1: \(32, 4\)", only_1=False),
    "batchnorm.md": _Page("", only_1=False, more=_SAME_WEIGHTS),
    "checkpoints.md": _Page("", only_1=False, more=_SAME_WEIGHTS),
    "compression.md": _Page(""),
    "concepts.md": _Page(r"rank 1 of 2: \[0\.5, 10\.0\]", only_1=False),
    "containers.md": _Page(r"rank 1 of 2: host 0 of 1, \d+ cores", only_1=False),
    "data.md": _Page(
        r"167 batches on rank 1, 168 steps(?s:.*)weights: the same",
        only_1=False,
        more=_SAME_WEIGHTS + "mykv.barrier()\nprint('weights: the same')\n",
    ),
    "elastic.md": _Page(r"rank 0 of 2 is at epoch 3", options=("--with-ft", "ulfm")),
    "errors.md": _Page(r"rank 0: .*lengths.*\(3,\).*\(4,\)", only_1=False),
    "get-started.md": _Page(r"epoch 2: loss 0\.\d+, rank 0 of 2", only_1=False),
    "gpu.md": _Page(""),
    "local-steps.md": _Page("", options=("--with-ft", "ulfm")),
    "optimizer-on-the-store.md": _Page(""),
    "real-networks.md": _Page(r"(?s)(rank 0: 22.*rank 1: 38|rank 1: 38.*rank 0: 22)"),
    "several-hosts.md": _Page(r"rank 1: .*, local rank 0 of 1, host 1 of 2", only_1=False, hosts=2),
    "precision-and-clipping.md": _Page(
        r"rank 1: norm \d\.\d+", only_1=False, old_names=True, more="mykv.check_in_step(small.collect_params())\n"
    ),
    "sparse.md": _Page(
        r"held \[0, 1, 99\] \[1.0, 0.0, 2.0\](?s:.*)held \[0, 1, 99\] \[1.0, 0.0, 2.0\]",
        more="print('held', total.indices.asnumpy().tolist(), rows.asnumpy()[[0, 1, 99], 0].tolist())\n",
    ),
    "statistics.md": _Page(r"rank 1 came last in \d+% of the steps\nthe others waited \d+\.\d ms(?s:.*)20 steps, "),
    "timeline.md": _Page(""),
    "training.md": _Page(
        r"(?s)f1 0\.9\d+.*accuracy 0\.9\d+",
        only_1=False,
        old_names=True,
        more=_SAME_WEIGHTS + "if mykv.rank() == 0:\n    print('accuracy', accuracy)\n",
    ),
    "tuning.md": _Page(r"rank 1 of 2: \d+\.\d\d ms"),
}
_NAMES_OF_2 = {
    "mx.metric": "mx.gluon.metric",
    "mykv.init()": "mykv.init()\nmx.npx.set_np()",
    "mxnet.contrib import amp": "mxnet import amp",
    "net.collect_params().zero_grad()": "net.zero_grad()",
}
_NAVIGATION = (_ROOT / "mkdocs.yml").read_text()
_GUIDES = re.findall(r": ([\w-]+\.md)$", _NAVIGATION.split("- Guides:")[1].split("- Coming from:")[0], re.MULTILINE)
_SAVES = "net.save_parameters("
_END = "import mxnet\nmxnet.nd.waitall()\nprint('the end')\n"  # errors that no line has read are raised
_TESTED_ELSEWHERE = {"learning-rate.md", "notebooks.md"}
# Left out of `make test`.
_LONG = [
    "backward.md",
    "batchnorm.md",
    "compression.md",
    "concepts.md",
    "containers.md",
    "elastic.md",
    "gpu.md",
    "local-steps.md",
    "optimizer-on-the-store.md",
    "precision-and-clipping.md",
    "real-networks.md",
    "several-hosts.md",
    "sparse.md",
    "timeline.md",
    "tuning.md",
]


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _program(name: str, page: _Page) -> str:
    """The blocks of a page as one program for this MXNet and this processor."""
    program = "\n".join([*_blocks(_DOCS / name), page.more, _END])
    if IS_2 and page.old_names:
        for old, new in _NAMES_OF_2.items():
            program = program.replace(old, new)
    if IS_2 or why_no_layers_in_bfloat16():
        # amp.init('bfloat16') of 2.0.0b1 ends with a KeyError, and dense layers in float16 need a GPU.
        program = program.replace('amp.init("bfloat16")', 'amp.init("float16", target_precision_ops=[])')
    return program


def _numbers(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+), rank 0 of 2$", text, re.MULTILINE)]


# Words with a letter or digit in README.md and docs/*.md; docs/reference/ is generated. There is some room for new
# rows. Without room, shorten a page.
_MOST_WORDS = 44_800


def test_readme_and_pages_stay_short():
    pages = [_ROOT / "README.md", *_DOCS.glob("*.md")]
    words = sum(bool(re.search(r"[A-Za-z0-9]", word)) for page in pages for word in page.read_text().split())
    assert words <= _MOST_WORDS, f"{words} words"


def test_rows_of_tables_follow_the_header_of_their_table():
    """A blank line ends a table: rows behind it are shown as text."""
    pages = [_ROOT / "README.md", *_DOCS.glob("*.md")]
    blocks = [(page.name, block) for page in pages for block in re.findall(r"(?m)(?:^\|.*\n?)+", page.read_text())]
    assert len(blocks) > 100
    assert not [(name, block) for name, block in blocks if not re.match(r"\|.*\n\|[-| :]+\|\n", block)]


def test_the_page_shows_the_program_as_it_is():
    assert _PROGRAM in _blocks(_DOCS / "get-started.md"), "get-started.md does not show examples/train.py"
    assert 20 <= sum(bool(line.strip()) for line in _PROGRAM.splitlines()) <= 30, "a program to be read at once"


def test_the_program_prints_what_the_pages_show(mpirun, tmp_path):
    result = mpirun(2, _ROOT / "examples/train.py", cwd=str(tmp_path))
    assert result.code == 0, result.text
    losses = _numbers(result.stdout)
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], result.text
    for page in _SHOWN:
        assert _numbers((_ROOT / page).read_text()) == pytest.approx(losses, abs=0.01), page
    assert (tmp_path / "net.params").exists(), "rank 0 saves"


_ONE_MORE_STEP = """with autograd.record():
    loss = loss_of(net(numbers), labels)
loss.backward()
trainer.step(len(numbers) + mykv.rank())
"""


def test_an_error_of_the_last_step_leaves_the_saved_file_as_it_was(mpirun, tmp_path):
    """save_parameters() empties the file before it waits for the weights."""
    saved = tmp_path / "net.params"
    saved.write_bytes(b"of an earlier job")
    before, after = _PROGRAM.split("mx.nd.waitall()")
    result = mpirun(2, f"{before}{_ONE_MORE_STEP}mx.nd.waitall(){after}", cwd=str(tmp_path))
    assert result.code != 0 and "batch size 32" in result.stderr and "batch size 33" in result.stderr, result.text
    assert saved.read_bytes() == b"of an earlier job"


def test_all_programs_wait_for_the_last_step_before_they_save():
    pages = [_ROOT / "README.md", *_DOCS.glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"^``` ?py.*?^```$", page.read_text(), re.M | re.S)]
    saving = [text for text in (*blocks, *map(Path.read_text, (_ROOT / "examples").glob("*.py"))) if _SAVES in text]
    assert len(saving) >= 6
    for text in saving:
        assert "waitall()" in text[: text.index(_SAVES)], text


def test_the_figures_of_the_first_page_are_those_of_the_benchmarks():
    quartiles = r" \([\d.]+ to [\d.]+\)(?= \|)"
    measured = re.sub(quartiles, "", (_DOCS / "benchmarks.md").read_text()).splitlines()
    text = (_ROOT / "README.md").read_text().replace("](docs/", "](")
    lines = re.findall(r"^\| .* ms.*\|$|^\| 2 workers .*\|$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert line in measured, f"docs/benchmarks.md has no line {line}"


@pytest.mark.parametrize("page", ["faq.md", "optimizer-on-the-store.md", "running.md", "tuning.md"])
def test_times_on_other_pages_occur_in_the_benchmarks(page):
    of_benchmarks = (_DOCS / "benchmarks.md").read_text() + (_DOCS / "benchmarks-hosts.md").read_text()
    measured = [float(time) for time in re.findall(r"(\d+(?:\.\d+)?) ms\b", of_benchmarks)]
    for table in ("benchmarks", "benchmarks-hosts"):
        rows = (_DOCS / table / "times.csv").read_text().splitlines()
        measured += [float(row.split(",")[-5]) for row in rows if row.split(",")[-2] == "ms"]
    for time in re.findall(r"(\d+(?:\.\d+)?) ms\b", (_DOCS / page).read_text()):
        decimals = len(time.partition(".")[2])
        assert time in {f"{one:.{decimals}f}" for one in measured}, (
            f"{page}: {time} ms is in no table of the benchmarks"
        )


def _cells(table: str) -> list[list[str]]:
    """The cells of a table of Markdown, without its head, links replaced by their texts in the first column."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    return [[re.sub(r"\[(.+?)\]\([^)]+\)", r"\1", row[0]), *row[1:]] for row in rows]


def test_each_line_of_the_comparison_has_a_test():
    comparison, others = re.split(r"\n## .+\n", (_DOCS / "comparison.md").read_text())
    rows, of_others = _cells(comparison), _cells(others)
    lines = [row[0] for row in rows]
    named_tests = (_ROOT / "tests/project/comparison_tests.toml").read_text()
    proofs = re.findall(r'^"(.+)" = \[(.+)\]$', named_tests, re.MULTILINE)
    assert [line for line, _ in proofs] == lines and len(lines) > 10
    assert [row[0] for row in of_others] == [line for line in lines if line in {row[0] for row in of_others}]
    assert len(of_others) > 14 and {len(row) for row in of_others} == {4}
    for line, tests in proofs:
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", tests)
        assert len(named) == tests.count("::") > 0, line
        for file, test in named:
            assert re.search(rf"^def {test}\(", (_ROOT / file).read_text(), re.MULTILINE), f"{line}: {file}::{test}"


# A stand-in for GluonTS 0.13.9 with what the page replaces. Its Trainer makes a gluon.Trainer with these arguments.
_GLUONTS = """
import sys, types
import mxnet as mx
base = types.ModuleType('gluonts.mx.trainer._base')
base.loss_value = lambda metric: metric.get()[1]
package = types.ModuleType('gluonts.mx.trainer')
package._base = base
sys.modules.update({'gluonts': package, 'gluonts.mx': package, package.__name__: package, base.__name__: base})
"""
_GLUONTS_TRAINS = """
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(1))
net.hybridize()
net.initialize(mx.init.Xavier())
batch = mx.nd.ones((2, 3))
net(batch)
trainer = mx.gluon.Trainer(net.collect_params(), optimizer=mx.optimizer.Adam(learning_rate=0.01), kvstore='device')
metric = mx.metric.Loss()
for _ in range(3):
    with mx.autograd.record():
        loss = net(batch * (1 + mykv.rank())) ** 2
    loss.backward()
    trainer.step(2)
    metric.update(None, preds=loss)
    print('loss of all', base.loss_value(metric))
mykv.check_in_step(net.collect_params())
"""


@pytest.mark.skipif(IS_2, reason="GluonTS is for MXNet 1.x")
def test_the_recipe_for_gluonts_runs_as_printed(mpirun):
    """In a program that has not called init() before, as on the page."""
    recipe = re.search(r"^``` py\n(.*?gluonts.*?)^```$", (_DOCS / "training.md").read_text(), re.MULTILINE | re.DOTALL)
    result = mpirun(2, _GLUONTS + recipe.group(1) + _GLUONTS_TRAINS)
    assert result.code == 0, result.text
    losses = re.findall(r"loss of all (\S+)", result.stdout)
    assert len(losses) == 6 and len(set(losses)) == 3, result.text


_LITTLE = "a all and at for from how in is it not of on or that the to when which who with"


def _words(text: str) -> set[str]:
    """The words of an anchor or a heading by their first five letters, without stop words."""
    return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in _LITTLE.split()}


@pytest.mark.parametrize("page", [page.name for page in sorted(_DOCS.glob("*.md"))])
def test_anchors_stand_above_their_own_sections(page):
    """An anchor of an earlier heading matches its own heading at least as well as any other."""
    text = re.sub(r"^```.*?^```$", "", (_DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = {found.start(): found.group(1) for found in re.finditer(r"^#+ (.+)$", text, re.MULTILINE)}
    for anchor in re.finditer(r'^<a id="([\w-]+)"></a>$', text, re.MULTILINE):
        own = next((heading for place, heading in headings.items() if place > anchor.end()), None)
        shared = {heading: len(_words(heading) & _words(anchor.group(1))) for heading in headings.values()}
        best = max(shared, key=lambda heading: (shared[heading], heading == own))
        assert shared[best] < 2 or best == own, f"#{anchor.group(1)} stands above {own!r}, and belongs to {best!r}"


def test_guides_begin_with_code_that_runs():
    assert len(_GUIDES) > 8
    for name in _GUIDES:
        assert name in _PROGRAMS or name in _TESTED_ELSEWHERE, f"{name}: list it in _PROGRAMS"
        first = re.search(r"^```.*$", (_DOCS / name).read_text(), re.MULTILINE)
        assert first and first.group() == "```python", f"{name} does not begin with code that runs"


@pytest.mark.parametrize("name", [long(name) if name in _LONG else name for name in sorted(_PROGRAMS)])
def test_the_code_on_the_page_runs(mpirun, tmp_path, name):
    page = _PROGRAMS[name]
    if IS_2 and page.only_1:
        pytest.skip("blocks of MXNet 2.0 do not take the arrays of such programs")
    if page.options and not launcher.is_open_mpi():
        pytest.skip("only Open MPI's mpirun has --with-ft ulfm")
    program = _program(name, page)
    environment = {"MYKV_VIRTUAL_HOSTS": str(page.hosts)}
    result = mpirun(2, program, cwd=str(tmp_path), env=environment, options=page.options)
    assert result.code == 0 and result.stdout.count("the end") == 2, result.text
    assert re.search(page.output, result.stdout), result.text
    if name == "timeline.md":
        names = {phase.name for call in read(str(tmp_path / "timeline.mykv")).calls for phase in call.phases}
        assert "reduce" in names, names
