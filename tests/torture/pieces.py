"""Components of drawn trainings: a network, optimizers, schedules, data, and children of a worker."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import random
from typing import Any, Callable

import numpy as np
from harness.support import IS_2, array, mx, structure

from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon import nn  # isort: skip

INPUTS, ROWS = 6, 12  # rows of a whole batch, which 1, 2 and 3 workers can share
_LONGEST_CHILD_S = 100.0

OPTIMIZERS: list[tuple[str, dict]] = [
    ("sgd", {"learning_rate": 0.05}),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3}),
    ("nag", {"learning_rate": 0.05, "momentum": 0.5}),
    ("adam", {"learning_rate": 0.02}),
    ("adam", {"learning_rate": 0.02, "wd": 1e-2, "clip_gradient": 0.5}),
    ("rmsprop", {"learning_rate": 0.01}),
    ("lamb", {"learning_rate": 0.02}),
]


def drawn_optimizer(chance: random.Random, form: str) -> int:
    """The number of an optimizer that this release's Trainer takes in a form of training."""
    number = chance.randrange(len(OPTIMIZERS))
    is_refused = IS_2 and form == "stock on the store" and OPTIMIZERS[number][0] == "lamb"
    return 0 if is_refused else number


def takes_float64(number: int) -> bool:
    """Whether MXNet's optimizer has float64 for arrays of all its steps."""
    return OPTIMIZERS[number][0] in ("sgd", "nag", "adam")


class Inverse(mx.lr_scheduler.LRScheduler):
    """A user-defined schedule."""

    def __call__(self, num_update: int) -> float:
        return self.base_lr / (1 + num_update)


SCHEDULES: dict[str, Callable[[float], Any]] = {
    "factor": lambda rate: mx.lr_scheduler.FactorScheduler(2, 0.7, base_lr=rate),
    "poly": lambda rate: mx.lr_scheduler.PolyScheduler(20, base_lr=rate, pwr=1),
    "own": lambda rate: Inverse(base_lr=rate),
}


def optimizer(number: int, schedule: str) -> Any:
    """An optimizer of `OPTIMIZERS`, with a schedule of `SCHEDULES` or none."""
    name, settings = OPTIMIZERS[number]
    more = {"lr_scheduler": SCHEDULES[schedule](settings["learning_rate"])} if schedule else {}
    return mx.optimizer.create(name, **settings, **more)


class Values(mx.init.Initializer):
    """Values that depend on a seed and the shape alone, whenever MXNet asks for them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def _init_weight(self, name: Any, values: Any) -> None:
        draw = np.random.RandomState(self._seed + values.size)
        values[:] = array(draw.uniform(-0.5, 0.5, values.shape).astype(values.dtype))

    _init_bias = _init_gamma = _init_beta = _init_weight


def scope(block: Any) -> Any:
    """The names of a block's children, if this release has names."""
    return contextlib.nullcontext() if IS_2 else block.name_scope()


def dense(units: int, inputs: int, dtype: str, is_deferred: bool, **options: Any) -> Any:
    """A layer whose shape is known, or not before its first forward."""
    return nn.Dense(units, in_units=0 if is_deferred else inputs, dtype=dtype, **options)


class Net(nn.Block):
    """A body, a layer in the middle that a step may leave out, and an output layer that a program may replace.

    Parameters
    ----------
    dtype : str
    is_deferred : bool
        Whether shapes are known in the first forward only.
    norm : callable, optional
        Creates a normalization layer after the body.
    """

    def __init__(self, dtype: str, is_deferred: bool, norm: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        with scope(self):
            self.body = nn.HybridSequential()
            with scope(self.body):
                self.body.add(dense(7, INPUTS, dtype, is_deferred, activation="tanh"))
                self.body.add(dense(5, 7, dtype, is_deferred))
            self.norm = norm() if norm else None
            self.middle = dense(5, 5, dtype, is_deferred, activation="tanh")
            self.output = dense(3, 5, dtype, is_deferred)

    def forward(self, data: Any, uses_middle: bool = True) -> Any:
        """The output for a batch."""
        hidden = self.body(data)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return self.output(self.middle(hidden) if uses_middle else hidden)


def parameters(net: Any) -> list:
    """The parameters of a block in the order of its structure."""
    return list(structure(net).values())


def copied(net: Any) -> Any:
    """A deep copy of a network; None if MXNet cannot copy it, since it has run hybridized."""
    try:
        return copy.deepcopy(net)
    except (ValueError, TypeError):
        return None


def loss_of(net: Any, data: Any, uses_middle: bool = True) -> Any:
    """The sum of squares over the rows of `data`; to be called while autograd records."""
    return ((net(data, uses_middle) - 0.3) ** 2).sum()


def backward(net: Any, data: Any) -> None:
    """Compute gradients of a network."""
    with autograd.record():
        loss = loss_of(net, data)
    loss.backward()


def clip_norm(gradients: list, limit: float) -> None:
    """Clip gradients by their norm together; gluon.utils.clip_global_norm takes no float64."""
    norm = np.sqrt(sum(float((one.asnumpy().astype("float64") ** 2).sum()) for one in gradients))
    if norm > limit:
        for one in gradients:
            one[:] = one * (limit / norm)


def numbers(seed: int, rows: int, dtype: str) -> np.ndarray:
    """A batch that depends only on a seed."""
    return np.random.RandomState(seed % 2**32).uniform(-1, 1, (rows, INPUTS)).astype(dtype)


def trained_in_child(net: Any, data: np.ndarray, device: Any) -> None:
    """Run forward and backward in a forked child on its copy of the network."""

    def child() -> None:
        for factor in (1000, 1):
            backward(net, array(data * factor, ctx=device))
        for one in parameters(net):
            if one.grad_req != "null" and one._grad is not None:
                one.grad(device).asnumpy()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(_LONGEST_CHILD_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the child ended with {process.exitcode}")


class Adversarial(gluon.data.Dataset):
    """Rows, for each of which the network's gradient is computed where the row is loaded."""

    def __init__(self, net: Any, values: np.ndarray, device: Any) -> None:
        self._net, self._values, self._device = net, values, device

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> np.ndarray:
        row = array(self._values[number : number + 1], ctx=self._device)
        row.attach_grad()
        backward(self._net, row)
        return self._values[number] + 0 * np.sign(row.grad.asnumpy()[0])  # the row itself, as in the reference


def weighted(chance: random.Random, choices: dict[str, float]) -> str:
    """One of the names, by their weights."""
    return chance.choices(list(choices), list(choices.values()))[0]
