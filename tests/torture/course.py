"""A training drawn from pieces: the same code trains on all workers, or in one process with plain gluon.Trainer.

A piece is a method ``do_NAME(draw)``. It depends on its draw and on the program's earlier pieces, which are the same on
all workers and in one process.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import kvstore_plugin as mykv
import numpy as np
from harness.support import IS_2, array, clear_errors, mx, structure
from mpi4py import MPI

from . import pieces
from .job import say
from .pieces import Net, Values, loss_of, parameters

from mxnet import autograd, gluon  # isort: skip

_LATE_S = 200.0  # how much later a worker may reach the end of a program than the others
_TOLERANCE = {"float32": 2e-4, "float64": 2e-6}  # scalars of operators are float32
FORMS = ["own", "own on the store", "stock", "stock on the store"]


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of all workers."""

    seed: int
    form: str
    dtype: str = "float32"
    is_deferred: bool = False
    hybrid: str = ""  # "", "plain" or "static"
    optimizer: int = 0
    schedule: str = ""
    options: tuple[tuple[str, Any], ...] = ()  # of a DistributedTrainer
    has_own_device: bool = False  # cpu(rank) instead of cpu(0)
    takes_list: bool = False  # the trainer gets a list of Parameters instead of a dictionary
    norm: str = ""  # "", "batch" or "sync"
    start: str = "plain"
    phases: tuple[tuple[str, int], ...] = ()  # each with its seed

    @property
    def is_own(self) -> bool:
        """Whether it has DistributedTrainers, not gluon's."""
        return self.form.startswith("own")

    @property
    def is_on_store(self) -> bool:
        """Whether the optimizer is on the store."""
        return self.form.endswith("on the store")

    def option(self, name: str) -> Any:
        """An option of a DistributedTrainer."""
        return dict(self.options).get(name)


def sequence(chance: random.Random, weights: dict[str, float], least: int, most: int) -> tuple[tuple[str, int], ...]:
    """Draw pieces at random, by weight. The last piece is always a step."""
    names = [pieces.weighted(chance, weights) for _ in range(chance.randint(least, most))] + ["step"]
    return tuple((name, chance.randrange(2**30)) for name in names)


class Course:
    """One run of a program.

    Parameters
    ----------
    program : Program
    is_alone : bool
        One process with plain gluon.Trainer takes the whole batch, instead of a worker's share.
    is_hybrid : bool, optional
        False: networks are never hybridized.

    Attributes
    ----------
    trace : list of (str, dict)
        After each piece its name and a copy of each weight.
    """

    def __init__(self, program: Program, is_alone: bool = False, is_hybrid: bool = True) -> None:
        self.program, self.is_alone, self.is_hybrid = program, is_alone, is_hybrid
        self.rank, self.size = (0, 1) if is_alone else (mykv.rank(), mykv.size())
        self.device = mx.cpu(self.rank if program.has_own_device else 0)
        self.trace: list[tuple[str, dict]] = []
        self.dtype = program.dtype
        self.net: Any = None
        self.trainers: list[tuple[Any, list]] = []  # with their Parameters
        self.optimizer: Any = None
        self.held: list = []
        self._drawn = self._files = 0

    def all(self) -> list[tuple[str, dict]]:
        """Run all pieces; returns the trace, with numpy's arrays."""
        self.net = self.new_net(self.program.seed)
        getattr(self, "begin_" + self.program.start)(random.Random(self.program.seed + 1))
        self._note(self.program.start)
        for name, seed in self.program.phases:
            self.disturb("phase")
            getattr(self, "do_" + name)(random.Random(seed))
            self._note(name)
        mx.nd.waitall()
        return [(name, {key: one.asnumpy() for key, one in values.items()}) for name, values in self.trace]

    def disturb(self, where: str) -> None:
        """Hook for a worker's other local work."""

    def done(self) -> str:
        """The last action of `disturb`, for messages."""
        return ""

    def _note(self, name: str) -> None:
        known = {key: one for key, one in structure(self.net).items() if one._data is not None}
        self.trace.append((name, {key: one.data(self.device).copy() for key, one in known.items()}))

    # Building blocks of pieces.

    def new_net(self, seed: int) -> Any:
        """A network with its initial values."""
        norms = {"batch": lambda: gluon.nn.BatchNorm(in_channels=5), "sync": lambda: mykv.SyncBatchNorm(in_channels=5)}
        net = Net(self.dtype, self.program.is_deferred, norms.get(self.program.norm))
        self._initialize(net, seed)
        self._hybridize(net)
        return net

    def _initialize(self, block: Any, seed: int) -> None:
        block.initialize(Values(seed), ctx=self.device)

    def _hybridize(self, block: Any) -> None:
        if self.program.hybrid and self.is_hybrid:
            is_static = self.program.hybrid == "static"
            block.hybridize(static_alloc=is_static, static_shape=is_static)

    def new_trainer(self, params: list | None = None, optimizer: Any = None) -> tuple[Any, list]:
        """A trainer for Parameters, or for all of the network."""
        program = self.program
        optimizer = optimizer or pieces.optimizer(program.optimizer, program.schedule)
        optimizer.rescale_grad = 1.0  # a factor of trainers, which an earlier trainer may have set
        everything = parameters(self.net)
        given = params if params is not None else everything
        named = given if program.takes_list or params is not None else self.net.collect_params()
        self.disturb("trainer")
        if self.is_alone:
            return gluon.Trainer(named, optimizer, kvstore=None), given
        if program.is_own:
            on_store = program.is_on_store or None
            return mykv.DistributedTrainer(named, optimizer, update_on_kvstore=on_store, **dict(program.options)), given
        return gluon.Trainer(named, optimizer, kvstore="mykv", update_on_kvstore=program.is_on_store), given

    def make_trainer(self, params: list | None = None, optimizer: Any = None) -> None:
        """Replace all trainers by a new one."""
        self.trainers = [self.new_trainer(params, optimizer)]
        self.optimizer = self.trainers[0][0].optimizer

    def numbers(self) -> np.ndarray:
        """The next batch: this worker's share, or all of it."""
        self._drawn += 1
        whole = pieces.numbers(1000 * self.program.seed + self._drawn, pieces.ROWS, self.dtype)
        return whole[self.rank :: self.size]

    def data(self) -> Any:
        """The next batch as an array of MXNet."""
        return array(self.numbers(), ctx=self.device)

    @property
    def batch(self) -> float:
        """The batch size for a step."""
        return pieces.ROWS // self.size if self.program.is_own else pieces.ROWS

    @property
    def sums(self) -> float:
        """The ratio of the sum of all gradients to the result of allreduce_grads()."""
        is_mean = self.program.is_own and self.program.option("gradients_after_allreduce") != "sum"
        return self.size if is_mean else 1

    def gradients(self, params: list | None = None) -> list:
        """The gradient arrays of Parameters now."""
        given = parameters(self.net) if params is None else params
        return [one.grad(self.device) for one in given if one.grad_req != "null"]

    def hold(self) -> None:
        """Keep a list of the gradient arrays, like programs that clip through it."""
        if all(one._data is not None for one in parameters(self.net)):
            self.held = self.gradients()

    def backward(self, data: Any = None, uses_middle: bool = True) -> None:
        """Forward and backward of a batch."""
        with autograd.record():
            loss = loss_of(self.net, self.data() if data is None else data, uses_middle)
        self.disturb("backward")
        loss.backward()

    def step(self, draw: random.Random, ignore_stale_grad: bool = False) -> None:
        """Let a trainer step."""
        trainer, given = draw.choice(self.trainers)
        clip = self.program.option("clip_global_norm")
        if self.is_alone and clip:
            gradients = self.gradients(given)
            pieces.clip_norm(gradients, clip * pieces.ROWS)
        self.disturb("step")
        trainer.step(self.batch, ignore_stale_grad=ignore_stale_grad)
        self.forget()

    def update(self, change: Callable[[list], None] | None = None, draw: random.Random | None = None) -> None:
        """A step of allreduce_grads() and update(), with a change of the gradients between them."""
        trainer, given = draw.choice(self.trainers) if draw else self.trainers[0]
        trainer.allreduce_grads()
        gradients = self.gradients(given)
        self.disturb("step")
        if change:
            change(gradients)
        clip = self.program.option("clip_global_norm")
        if self.is_alone and clip:
            pieces.clip_norm(gradients, clip * pieces.ROWS)
        trainer.update(self.batch)
        self.forget()

    def forget(self) -> None:
        """Reset accumulated gradients."""
        self.zero([one for one in parameters(self.net) if one.grad_req == "add"])

    def zero(self, params: list) -> None:
        """Set gradients to 0; Parameter.zero_grad() of MXNet 2.0 takes no numpy arrays."""
        for one in self.gradients(params):
            one[:] = 0

    def refreeze(self, params: list, how: str) -> None:
        """Set grad_req of Parameters, after which gradient arrays are fetched again."""
        for one in params:
            one.grad_req = how
        self.hold()

    def move(self, net: Any) -> None:
        """reset_ctx to this worker's device."""
        if IS_2:
            net.reset_device(self.device)
        else:
            net.collect_params().reset_ctx(self.device)

    def folder(self) -> Path:
        """A new folder, shared by all workers."""
        self._files += 1
        own = f"alone{mykv.rank()}" if self.is_alone else "all"
        folder = Path(tempfile.gettempdir()) / f"{own}-{self.program.seed}-{self._files}"
        folder.mkdir(exist_ok=True)
        return folder

    def barrier(self) -> None:
        """Wait for the other workers."""
        if not self.is_alone:
            mykv.barrier()


def difference(program: Program, got: list, right: list) -> str:
    """The first difference of a run from the reference; empty if there is no difference."""
    tolerance = _TOLERANCE[program.dtype]
    for number, ((name, ours), (_, theirs)) in enumerate(zip(got, right)):
        if set(ours) != set(theirs):
            return f"after piece {number}, {name}: parameters {sorted(ours)} and {sorted(theirs)}"
        apart = {key: float(np.abs(ours[key] - theirs[key]).max()) for key in ours}
        worst = max(apart, key=lambda key: apart[key] if np.isfinite(apart[key]) else np.inf)
        if not apart[worst] <= tolerance * (1 + float(np.abs(theirs[worst]).max())):
            return f"after piece {number}, {name}: {worst} by {apart[worst]:.3g}"
    return "" if len(got) == len(right) else f"{len(got)} pieces and {len(right)}"


def together(course: Course) -> tuple[list, str]:
    """Run a course on all workers; returns its trace, and the error if it failed on all workers.

    If it fails on only some workers, or in a wait, they are out of step, and the job ends.
    """
    trace, error = [], ""
    try:
        trace = course.all()
    except Exception as caught:
        place = ["start", *(name for name, _ in course.program.phases)][len(course.trace)]
        error = f"in piece {len(course.trace)}, {place}: {type(caught).__name__}: {caught}"
    comm = MPI.COMM_WORLD
    told = np.zeros((comm.size, 2), "int64")
    mine = [1 + len(course.trace) if error else 0, "given up after" in error]
    request = comm.Iallgather(np.array(mine, "int64"), told)
    end = time.monotonic() + _LATE_S
    while not request.Test() and time.monotonic() < end:
        time.sleep(0.001)
    if not told.any():
        return trace, ""
    if len(set(told[:, 0])) > 1 or told[:, 1].any():  # workers may wait for each other from here on
        what = f"program {course.program.seed}, rank {mykv.rank()}, {course.program}"
        say(f"FAILED {what}: {error or 'no error here'}; pieces {told.tolist()}; {course.done()}".replace("\n", " "))
        time.sleep(1.0)
        comm.Abort(3)
    clear_errors()
    return trace, error
