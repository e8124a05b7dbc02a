"""What several pages show is the same text, and code on the pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.support import IS_2

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PROGRAM = (_ROOT / "examples/train.py").read_text()
_SHOWN = ["README.md", "docs/index.md", "docs/get-started.md"]  # where the program and its output stand

# Pages whose blocks of Python, in their order, are one program for two workers: with what its output must hold, and
# whether blocks of MXNet 2.0 take its arrays. Blocks that need more than MXNet begin with "``` py" instead. The pages
# on training and sparse gradients have tests of their own (test_everyday.py, test_sparse_reducer.py), the pages on
# migration too (test_docs.py).
_PROGRAMS = {
    "get-started.md": (r"epoch 2: loss 0\.\d+ on 2 workers", True),
    "errors.md": (r"rank 0: .*lengths.*\(3,\).*\(4,\)", True),
}


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _numbers(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+) on 2 workers$", text, re.MULTILINE)]


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
    measured = (_DOCS / "benchmarks.md").read_text().splitlines()
    for page in _SHOWN[:2]:
        text = (_ROOT / page).read_text().replace("](docs/", "](")
        lines = re.findall(r"^\| .* ms.*\|$|^\| 2 workers .*\|$", text, re.MULTILINE)
        assert len(lines) >= 5, page
        for line in lines:
            assert line in measured, f"{page}: docs/benchmarks.md has no line {line}"


@pytest.mark.parametrize("page", sorted(_PROGRAMS))
def test_the_code_on_the_page_runs(mpirun, tmp_path, page):
    output, also_2 = _PROGRAMS[page]
    if IS_2 and not also_2:
        pytest.skip("blocks of MXNet 2.0 do not take the arrays of such programs")
    result = mpirun(2, "\n".join(_blocks(_DOCS / page)), cwd=str(tmp_path))
    assert result.code == 0, result.text
    assert re.search(output, result.stdout), result.text
