"""Sockeye: its own commands prepare_data and train, the latter with --horovod for two workers.

The made sentences fill each bucket with one batch exactly, and both halves of a batch have equally many words. So a
step of two workers, each with half of a batch, is that of one process. Of the validation sentences each bucket has one,
since Sockeye shuffles their batches too, with the generator that shuffles those for training.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from comparison import WORKERS, Case, Curve, Failed, launch, main

_LENGTHS = (7, 15, 23)  # words of a sentence: with the end of the sentence each fills a bucket of eight
_BATCH = 16  # sentences, of all workers
_CHECKPOINTS, _UPDATES = 4, 6  # so many updates between two checkpoints
_WORDS = 20
# A small network without what is drawn at random, which one process and two workers would draw otherwise.
_OPTIONS = """
    --overwrite-output --no-logfile --use-cpu --seed 1 --batch-type sentence --decode-and-evaluate 0
    --transformer-model-size 32 --num-layers 1 --transformer-attention-heads 2 --transformer-feed-forward-num-hidden 64
    --transformer-dropout-attention 0 --transformer-dropout-act 0 --transformer-dropout-prepost 0
    --label-smoothing 0 --initial-learning-rate 0.01 --learning-rate-scheduler-type none
"""


class _Sockeye(Case):
    """One way to train: the options that differ."""

    def __init__(self, name: str, *options: str) -> None:
        super().__init__(name, None)
        self._options = options

    def curves(self, workers: int, directory: Path) -> list[Curve]:
        """The perplexities of the validation sentences at each checkpoint."""
        data = directory.parent.parent / "data"
        if not (data / "prepared").exists():
            _prepare(data)
        output = directory / "model"
        files = {
            "--prepared-data": data / "prepared",
            "--validation-source": data / "sources.one",
            "--validation-target": data / "targets.one",
            "--output": output,
            "--batch-size": _BATCH // workers,
            "--checkpoint-interval": _UPDATES,
            "--max-updates": _UPDATES * _CHECKPOINTS,
        }
        command = [sys.executable, "-m", "sockeye.train", *(str(one) for pair in files.items() for one in pair)]
        command += [*_OPTIONS.split(), *self._options]
        launch(workers, command + ["--horovod"] * (workers > 1), directory / "log")
        folders = [output] + [output / "secondary_workers" / str(rank) for rank in range(1, workers)]
        return [Curve(_perplexities(folder), _weights(folder)) for folder in folders]


def _prepare(data: Path) -> None:
    """Write sentences whose translation is their reverse, and let Sockeye prepare them."""
    rng = random.Random(0)
    data.mkdir(parents=True, exist_ok=True)
    sources = [[rng.randrange(_WORDS) for _ in range(length)] for length in _LENGTHS for _ in range(_BATCH)]
    for name, sentences in (("sources", sources), ("targets", [one[::-1] for one in sources])):
        lines = [" ".join(f"w{word}" for word in one) + "\n" for one in sentences]
        (data / name).write_text("".join(lines))
        (data / f"{name}.one").write_text("".join(lines[::_BATCH]))
    command = [sys.executable, "-m", "sockeye.prepare_data", "--source", str(data / "sources")]
    command += ["--target", str(data / "targets"), "--output", str(data / "prepared"), "--shared-vocab"]
    command += ["--bucket-width", "8", "--max-seq-len", "24"]
    launch(1, command, data / "log")


def _perplexities(folder: Path) -> list[float]:
    """Those of Sockeye's file metrics, one line for each checkpoint."""
    lines = (folder / "metrics").read_text().splitlines()
    parts = [part.split("=") for line in lines for part in line.split("\t") if "=" in part]
    found = [float(value) for name, value in parts if name == "perplexity-val"]
    if len(found) != _CHECKPOINTS:
        raise Failed(f"{folder / 'metrics'} has {len(found)} perplexities, not {_CHECKPOINTS}: {lines}")
    return found


def _weights(folder: Path) -> str:
    """A digest of the file of parameters that the last checkpoint has left."""
    import hashlib

    import mxnet as mx

    arrays = mx.nd.load(str(folder / f"params.{_CHECKPOINTS:05d}"))
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].asnumpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    assert _BATCH % WORKERS == 0
    main(
        [
            _Sockeye("Transformer, Adam"),
            _Sockeye(
                "Transformer, SGD, gradients of 3 batches added",
                *("--optimizer", "sgd", "--initial-learning-rate", "0.5", "--update-interval", "3"),
            ),
        ]
    )
