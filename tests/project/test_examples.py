"""The examples, as a user runs them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from harness.marks import long
from harness.support import IS_2

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _check(result, ranks):
    assert result.code == 0, result.text
    assert result.stdout.rstrip().endswith("PASSED"), result.text
    assert "weights of all workers: the same" in result.stdout
    shares = re.findall(r"^ +(\d+) +(\d+)  ([0-9a-f]{8})$", result.stdout, re.MULTILINE)
    assert [int(rank) for rank, _, _ in shares] == list(range(ranks)), result.text
    assert len({checksum for _, _, checksum in shares}) == 1
    assert sum(int(images) for _, images, _ in shares) > 1430
    difference = float(re.search(r"largest difference of the loss curves: (\S+)", result.stdout).group(1))
    assert 0 <= difference <= 1e-4 and (ranks == 1 or difference > 0), "the curves are of the same run"
    accuracy = float(re.search(r"accuracy on 360 held-out digits: ([\d.]+)%", result.stdout).group(1))
    assert accuracy >= 97
    assert result.stderr.count("epochs:   0%") == 1, "the progress bar is rank 0's only"


@pytest.mark.parametrize("name", ["digits.py", long("digits_trainer.py")])
def test_digits_on_two_workers(mpirun, name):
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    _check(mpirun(2, _EXAMPLES / name, timeout=120), 2)


@pytest.mark.long
def test_digits_alone(mpirun):
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    _check(mpirun(0, _EXAMPLES / "digits.py", timeout=120), 1)


@pytest.mark.long
@pytest.mark.parametrize("broken", ["pushpull", "accuracy"])
def test_digits_notice_what_is_wrong(mpirun, broken):
    """The proof fails if workers train alone, or if the network has learned nothing."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    sabotage = {
        "pushpull": """
            from kvstore_plugin.gradients.dense_reducer import DenseReducer
            DenseReducer.allreduce = lambda self, *arguments, **named: None
            """,
        "accuracy": "digits_common.SGD['learning_rate'] = 0.0",
    }
    script = f"""
    import sys
    sys.path.insert(0, {str(_EXAMPLES)!r})
    import kvstore_plugin, digits_common
    digits_common.EPOCHS = 2
    """
    script = textwrap.dedent(script) + textwrap.dedent(sabotage[broken]) + "\nimport digits\nsys.exit(digits.main())\n"
    result = mpirun(2, script, timeout=120)
    assert result.code == 1 and "FAILED" in result.stdout, result.text
    assert ("NOT THE SAME" in result.stdout) == (broken == "pushpull"), result.text


_OF_DIGITS = [
    ("digits", "sklearn"),
    ("digits", "tqdm"),
    long("digits_trainer", "sklearn"),
    ("gluon_digits", "sklearn"),
    long("module_digits", "sklearn"),
    long("module_store_digits", "sklearn"),
]


@pytest.mark.parametrize(("name", "missing"), _OF_DIGITS)
def test_a_missing_package_is_one_sentence_with_the_command(mpirun, name, missing):
    if missing == "tqdm":
        pytest.importorskip("sklearn")
    script = f"""
    import runpy, sys
    sys.modules[{missing!r}] = None  # as if it was not installed
    sys.path.insert(0, {str(_EXAMPLES)!r})
    runpy.run_path({str(_EXAMPLES / name)!r} + ".py", run_name="__main__")
    """
    result = mpirun(0, script, timeout=60)
    needed = "scikit-learn and tqdm" if "common" in (_EXAMPLES / f"{name}.py").read_text() else "scikit-learn"
    assert result.code == 1, result.text
    assert result.stderr.splitlines()[-1] == f"This example needs {needed}: pip install 'mykv[demo]'", result.text
    assert "Traceback" not in result.text


@pytest.mark.long
def test_gluon_script_learns(mpirun):
    pytest.importorskip("sklearn")
    result = mpirun(2, _EXAMPLES / "gluon_digits.py", timeout=120)
    assert result.code == 0, result.text
    epochs = re.findall(r"^epoch +(\d+): loss ([\d.]+), accuracy ([\d.]+)%", result.stdout, re.MULTILINE)
    assert [int(number) for number, _, _ in epochs] == list(range(1, 13)), result.text
    assert float(epochs[-1][1]) < 0.1 * float(epochs[0][1]) and float(epochs[-1][2]) >= 96, result.text


@pytest.mark.parametrize(
    "name", ["contrastive.py", long("divided_embedding.py"), long("divided_layers.py"), long("pipeline.py")]
)
def test_gradients_through_collectives_give_what_one_process_gives(mpirun, tmp_path, name):
    for ranks in (1, 2):
        result = mpirun(ranks, _EXAMPLES / name, "--save", tmp_path / f"{ranks}.npz", timeout=120)
        assert result.code == 0 and "step 20: loss" in result.stdout, result.text
    alone, together = (np.load(tmp_path / f"{ranks}.npz") for ranks in (1, 2))
    for each in alone.files:  # the loss and the weights after 20 steps
        np.testing.assert_allclose(together[each], alone[each], rtol=0, atol=1e-6)
    assert len((_EXAMPLES / name).read_text().splitlines()) <= 120


@pytest.mark.long
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
@pytest.mark.parametrize("name", ["module_digits.py", "module_store_digits.py"])
def test_module_script_learns_the_same_on_both_workers(mpirun, name):
    pytest.importorskip("sklearn")
    result = mpirun(2, _EXAMPLES / name, timeout=120)
    assert result.code == 0, result.text
    assert "weights of all workers: the same" in result.stdout, result.text
    accuracy = float(re.search(r"accuracy on 360 held-out digits: ([\d.]+)%", result.stdout).group(1))
    assert accuracy >= 95, result.text


@pytest.mark.long
def test_synthetic_benchmark_counts_images(mpirun):
    model = "--model mobilenet0.25 --image-size 32 --classes 10 --batch-size 2"
    times = "--num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"
    result = mpirun(2, _EXAMPLES / "synthetic_benchmark.py", *model.split(), *times.split(), timeout=120)
    assert result.code == 0, result.text
    rates = [float(rate) for rate in re.findall(r"^iteration \d: ([\d.]+) img/sec", result.stdout, re.MULTILINE)]
    one, _ = _mean_and_deviation("img/sec per worker", result.stdout)
    both, _ = _mean_and_deviation(r"img/sec on 2 worker\(s\)", result.stdout)
    assert len(rates) == 3 and min(rates) > 0, result.text
    assert one == pytest.approx(sum(rates) / 3, abs=0.1) and both == pytest.approx(2 * one, abs=0.2), result.text


@pytest.mark.smoke
def test_image_records_of_unequal_parts_train_together(mpirun):
    result = mpirun(2, _EXAMPLES / "image_records.py", timeout=120)
    assert result.code == 0, result.text
    epochs = re.findall(
        r"^epoch \d: pictures \[(\d+), (\d+)\], batches \[(\d+), (\d+)\], steps \[(\d+), (\d+)\]$",
        result.stdout,
        re.MULTILINE,
    )
    assert len(epochs) == 4, result.text
    for numbers in epochs:
        first, second, batches, more, steps, same = map(int, numbers)
        assert first + second == 600 and batches < more, "each picture once, in unequal parts"
        assert steps == same == more, "the worker with less data takes part in the steps of the other"
    assert _shares_and_equal_weights(r"accuracy ([\d.]+)%", result)[-1] >= 95, result.text


@pytest.mark.long
@pytest.mark.skipif(IS_2, reason="Gluon 2.0 has no sparse gradients")
def test_sparse_language_model_learns(mpirun):
    result = mpirun(2, _EXAMPLES / "sparse_language_model.py", timeout=120)
    perplexities = _shares_and_equal_weights(r"perplexity ([\d.]+)", result)
    assert len(perplexities) == 4 and perplexities[-1] < 3 < 4 < perplexities[0], result.text
    rows, clipped = map(int, re.search(r"rows in a step (\d+) of 20000, .* norm (\d+) of 160", result.stdout).groups())
    assert 100 < rows < 400 and 0 < clipped < 160, result.text


@pytest.mark.long
@pytest.mark.skipif(IS_2, reason="the script has the names of MXNet 1.9.1")
def test_masked_pretraining_learns(mpirun):
    result = mpirun(2, _EXAMPLES / "masked_pretraining.py", timeout=120)
    shares = _shares_and_equal_weights(r"([\d.]+)% of the hidden words guessed", result)
    assert len(shares) == 4 and shares[0] < 60 and shares[-1] > 95, result.text
    assert re.search(r"^computed in (b?float16, loss scale \d+|float32)$", result.stdout, re.MULTILINE), result.text


@pytest.mark.parametrize("name", ["image_records.py", "sparse_language_model.py", "masked_pretraining.py"])
def test_examples_of_networks_are_short_and_stand_in_the_docs(name):
    text = (_EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 150 and "What the real task needs:" in text
    assert f"examples/{name}" in (_EXAMPLES.parent / "docs/real-networks.md").read_text()


def _shares_and_equal_weights(pattern, result):
    """The numbers of a pattern in the output of a script that has found the same weights on all workers."""
    assert result.code == 0, result.text
    assert "weights of all workers: the same" in result.stdout, result.text
    return [float(number) for number in re.findall(pattern, result.stdout)]


def _mean_and_deviation(what, output):
    return (float(number) for number in re.search(rf"^{what}: ([\d.]+) \+- ([\d.]+)", output, re.MULTILINE).groups())
