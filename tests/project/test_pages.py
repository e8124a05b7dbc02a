"""What several pages show is the same text, and code on the pages runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import launcher
from harness.marks import long
from harness.support import IS_2

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PROGRAM = (_ROOT / "examples/train.py").read_text()
_SHOWN = ["README.md", "docs/index.md", "docs/get-started.md"]  # where the program and its output stand


class _Page(NamedTuple):
    """How the code of a page is run: what the output must hold, and with what."""

    output: str  # a regular expression
    only_1: bool = True  # blocks of MXNet 2.0 do not take its arrays
    hosts: int = 1
    options: tuple[str, ...] = ()  # of mpirun
    more: str = ""  # code behind that of the page


# Pages whose blocks of Python, in their order, are one program for two workers. Pieces that are no program, or need
# more than MXNet, begin with "``` py" instead. The page on training has a test of its own (test_everyday.py), and
# those on migration too (test_docs.py).
_PROGRAMS = {
    "compression.md": _Page(""),
    "concepts.md": _Page(r"rank 1 of 2: \[0\.5, 10\.0\]", only_1=False),
    "elastic.md": _Page(r"rank 0 of 2 is at epoch 3", options=("--with-ft", "ulfm")),
    "errors.md": _Page(r"rank 0: .*lengths.*\(3,\).*\(4,\)", only_1=False),
    "get-started.md": _Page(r"epoch 2: loss 0\.\d+, rank 0 of 2", only_1=False),
    "gpu.md": _Page(""),
    "local-steps.md": _Page("", options=("--with-ft", "ulfm")),
    "optimizer-on-the-store.md": _Page(""),
    "several-hosts.md": _Page(r"rank 1: .*, local rank 0 of 1, host 1 of 2", only_1=False, hosts=2),
    "sparse.md": _Page(
        r"held \[0, 1, 99\] \[1.0, 0.0, 2.0\](?s:.*)held \[0, 1, 99\] \[1.0, 0.0, 2.0\]",
        more="print('held', total.indices.asnumpy().tolist(), rows.asnumpy()[[0, 1, 99], 0].tolist())\n",
    ),
    "timeline.md": _Page(""),
}
_NAVIGATION = (_ROOT / "mkdocs.yml").read_text()
_GUIDES = re.findall(r": ([\w-]+\.md)$", _NAVIGATION.split("- Guides:")[1].split("- Coming from:")[0], re.MULTILINE)
_END = "import mxnet\nmxnet.nd.waitall()\nprint('the end')\n"  # errors that no line has read are raised
_TESTED_ELSEWHERE = {"training.md", "learning-rate.md"}
_LONG = ["compression.md", "elastic.md", "gpu.md", "local-steps.md", "timeline.md"]  # left out of `make test`


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _numbers(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+), rank 0 of 2$", text, re.MULTILINE)]


def test_the_program_is_the_same_text_everywhere():
    for page in _SHOWN:
        assert _PROGRAM in _blocks(_ROOT / page), f"{page} does not show examples/train.py"
    assert 20 <= sum(bool(line.strip()) for line in _PROGRAM.splitlines()) <= 30, "a program to be read at once"


def test_the_program_prints_what_the_pages_show(mpirun, tmp_path):
    result = mpirun(2, _ROOT / "examples/train.py", cwd=str(tmp_path))
    assert result.code == 0, result.text
    losses = _numbers(result.stdout)
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], result.text
    for page in _SHOWN:
        assert _numbers((_ROOT / page).read_text()) == pytest.approx(losses, abs=0.01), page
    assert (tmp_path / "net.params").exists(), "rank 0 saves"


def test_the_figures_of_the_first_pages_are_those_of_the_benchmarks():
    quartiles = r" \([\d.]+ to [\d.]+\)(?= \|)"
    measured = re.sub(quartiles, "", (_DOCS / "benchmarks.md").read_text()).splitlines()
    for page in _SHOWN[:2]:
        text = (_ROOT / page).read_text().replace("](docs/", "](")
        lines = re.findall(r"^\| .* ms.*\|$|^\| 2 workers .*\|$", text, re.MULTILINE)
        assert len(lines) >= 5, page
        for line in lines:
            assert line in measured, f"{page}: docs/benchmarks.md has no line {line}"


def _cells(table: str) -> list[list[str]]:
    """The cells of a table of Markdown, without its head, links replaced by their texts in the first column."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    return [[re.sub(r"\[(.+?)\]\([^)]+\)", r"\1", row[0]), *row[1:]] for row in rows]


def test_each_line_of_the_comparison_names_its_page_and_a_test():
    comparison, proofs = (_DOCS / "comparison.md").read_text().split("\n## Where each line is explained and tested\n")
    rows = _cells(proofs)
    assert [row[0] for row in rows] == [row[0] for row in _cells(comparison)] and len(rows) > 10
    for line, explained, tests in rows:
        page = re.fullmatch(r"\[.+\]\(([\w-]+\.md)(?:#.+)?\)", explained)
        assert page and (_DOCS / page.group(1)).exists(), line
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
        assert len(named) == tests.count("::") > 0, line
        for file, test in named:
            assert re.search(rf"^def {test}\(", (_ROOT / file).read_text(), re.MULTILINE), f"{line}: {file}::{test}"


def test_guides_begin_with_code_that_runs():
    assert len(_GUIDES) > 8
    for name in _GUIDES:
        if name in _PROGRAMS or name in _TESTED_ELSEWHERE:
            first = re.search(r"^```.*$", (_DOCS / name).read_text(), re.MULTILINE)
            assert first and first.group() == "```python", f"{name} does not begin with code that runs"
        else:
            assert not _blocks(_DOCS / name), f"{name}: list it in _PROGRAMS, or begin its code with ``` py"


@pytest.mark.parametrize("name", [long(name) if name in _LONG else name for name in sorted(_PROGRAMS)])
def test_the_code_on_the_page_runs(mpirun, tmp_path, name):
    page = _PROGRAMS[name]
    if IS_2 and page.only_1:
        pytest.skip("blocks of MXNet 2.0 do not take the arrays of such programs")
    if page.options and not launcher.is_open_mpi():
        pytest.skip("only Open MPI's mpirun has --with-ft ulfm")
    program = "\n".join([*_blocks(_DOCS / name), page.more, _END])
    environment = {"MYKV_VIRTUAL_HOSTS": str(page.hosts)}
    result = mpirun(2, program, cwd=str(tmp_path), env=environment, options=page.options)
    assert result.code == 0 and result.stdout.count("the end") == 2, result.text
    assert re.search(page.output, result.stdout), result.text
    if name == "timeline.md":
        names = {event.get("name") for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
        assert "reduce" in names, names
