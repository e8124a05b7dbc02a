"""A rank that trains small networks, in which one rank now and then makes a user's mistake; all catch it and go on.

Each program runs twice, without its mistakes and with them. Afterwards all ranks must have the same weights, and those
of the run without mistakes, bit by bit, unless all ranks have had an error after which the program makes them equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import kvstore_plugin as mykv
import numpy as np
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, fail, mx, structure
from mpi4py import MPI

from .job import say
from .loop import loop

from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon import nn  # isort: skip

_LIMIT = 120.0  # seconds for one program, which waits for some seconds where a rank leaves a step out
_BATCH, _WORDS, _INPUTS = 4, 30, 6
_RATE = 0.125
_KINDS = [
    "own",
    "copied",
    "on the store",
    "clipping",
    "global norm",
    "global norm on the store",
    "deferred",
    "join",
    "stock",
    "stock on the store",
    "keys",
]
_SPARSE = [] if IS_2 else ["sparse", "sparse on the store"]
# Of a step. After the last two a rank has other weights than the others, which all are told in their next step.
_OF_A_STEP = ["batch", "rate", "unused", "stale", "carries an error", "loss", "update", "weights file"]
_EXTRAS = ["pushpull", "allreduce", "broadcast_parameters", "check_in_step", "save", "load", "barrier", "allgather"]
_OF_AN_EXTRA = {
    "pushpull": ["shape", "dtype"],
    "allreduce": ["shape", "dtype"],
    "allgather": ["shape", "dtype"],
    "broadcast_parameters": ["argument"],
    "check_in_step": ["argument"],
    "save": ["file"],
    "load": ["file"],
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What a rank does wrong in a phase of a program."""

    phase: int
    rank: int
    what: str


@dataclasses.dataclass(frozen=True)
class Program:
    """What all ranks do."""

    seed: int
    kind: str
    phases: tuple[str, ...]  # "step" and extras
    mistakes: tuple[Mistake, ...]


def drawn(seed: int, size: int) -> Program:
    """The program with a seed."""
    chance = random.Random(seed)
    kind = chance.choice(_KINDS + _SPARSE)
    phases: list[str] = []
    for _ in range(chance.randint(2, 4)):
        phases += [chance.choice(_EXTRAS)] if chance.random() < 0.4 else []
        phases.append("step")
    mistakes = []
    for phase in chance.sample(range(len(phases)), min(chance.choice([1, 1, 2]), len(phases))):
        what = _of_a_step(kind) if phases[phase] == "step" else _OF_AN_EXTRA.get(phases[phase], [])
        is_first = phases[:phase].count("step") == 0  # there a store by name is not known to a rank that does not come
        if kind.startswith("stock") and phases[phase] == "step" and is_first:
            what = [one for one in what if one not in ("loss", "weights file")]
        if what:
            mistakes.append(Mistake(phase, chance.randrange(size), chance.choice(what)))
    return Program(seed, kind, tuple(phases), tuple(mistakes))


def _of_a_step(kind: str) -> list[str]:
    if kind == "keys":
        return ["carries an error"]
    if kind == "join":
        return ["unused", "stale", "carries an error", "loss"]  # the others' steps are those of a rank that has ended
    if kind == "stock on the store":
        return [one for one in _OF_A_STEP if one not in ("unused", "stale")]  # which MXNet does not see there
    if kind == "deferred":
        return [*_OF_A_STEP, "unused", "unused", "stale"]
    return _OF_A_STEP


class _Initial(mx.init.Initializer):
    """The same values whenever it is called, others on each rank."""

    def _init_weight(self, name: Any, values: Any) -> None:
        draw = np.random.RandomState(values.size + mykv.rank())
        values[:] = array(draw.uniform(-0.5, 0.5, values.shape).astype("float32"))


class _Net(nn.Block):
    """Of its three layers the middle one may be left out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        is_deferred = kind == "deferred"
        self.is_sparse = "sparse" in kind
        with contextlib.nullcontext() if IS_2 else self.name_scope():
            if self.is_sparse:
                self.first = nn.Embedding(_WORDS, 5, sparse_grad=True)
            else:
                self.first = nn.Dense(5, **({} if is_deferred else {"in_units": _INPUTS}))
            self.middle = nn.Dense(5, activation="tanh", **({} if is_deferred else {"in_units": 5}))
            self.last = nn.Dense(3, **({} if is_deferred else {"in_units": 5}))

    def forward(self, data: Any, uses_middle: bool = True) -> Any:
        """The output for a batch."""
        hidden = self.first(data)
        return self.last(self.middle(hidden) if uses_middle else hidden)


class _Sgd(mx.optimizer.SGD):
    """SGD with momentum, that may be told to fail."""

    fails = False

    def update_multi_precision(self, *arguments: Any) -> None:
        """An update, or an exception."""
        if self.fails:
            raise ArithmeticError("planted in the update")
        super().update_multi_precision(*arguments)


class Run:
    """One run of a program on one rank."""

    def __init__(self, program: Program, store: Any, with_mistakes: bool) -> None:
        self.program, self._store, self._with_mistakes = program, store, with_mistakes
        self.errors: list[str] = []
        self.all_failed = False  # in some phase
        self._steps = 0
        self._rank, self._size = mykv.rank(), mykv.size()
        kind = program.kind
        self.net = _Net(kind)
        self.net.initialize(_Initial())
        self._optimizer = mx.optimizer.SGD(learning_rate=_RATE, momentum=0.5)
        self._optimizer.__class__ = _Sgd
        self._trainer = self._made(kind)

    def _made(self, kind: str) -> Any:
        params = self.net.collect_params()
        if kind == "keys":
            mykv.broadcast_parameters(params)
            return None
        if kind.startswith("stock"):
            mykv.broadcast_parameters(params)
            on_store = kind == "stock on the store"
            return gluon.Trainer(params, self._optimizer, kvstore=mx.kv.create("mykv"), update_on_kvstore=on_store)
        options = {"bucket_bytes": 0} if kind == "copied" else {}
        if kind.startswith("global norm"):
            options["clip_global_norm"] = 0.1
        return mykv.DistributedTrainer(
            params, self._optimizer, update_on_kvstore=kind.endswith("on the store"), **options
        )

    def all(self) -> str:
        """Run all phases, and return the digest of the weights."""
        for number, phase in enumerate(self.program.phases):
            mistake = next((one for one in self.program.mistakes if one.phase == number), None)
            if not self._with_mistakes:
                mistake = None
            what = mistake.what if mistake is not None and mistake.rank == self._rank else ""
            self._phase(number, phase, what, mistake)
            self._steps += phase == "step"
        return checksum(self.net)

    def _phase(self, number: int, phase: str, what: str, mistake: Mistake | None) -> None:
        call = self._step if phase == "step" else getattr(self, "_" + phase)
        failed = self._attempt(call, what)
        if mistake is None and any(failed):
            raise RuntimeError(f"phase {number}, {phase}, fails without a mistake")
        for _ in range(2):
            if not any(failed):
                return
            # These leave some weights of a step updated, on all ranks alike, or on all but one.
            is_lasting = mistake.what in ("update", "weights file")
            self.all_failed |= all(failed) and (is_lasting or mistake.what == "carries an error")
            makes_equal = all(failed) and is_lasting
            if makes_equal and any(self._attempt(self._make_equal, str((mistake.rank + 1) % self._size))):
                raise RuntimeError("broadcast_states fails")
            failed = self._attempt(call, "")
        if any(failed):
            raise RuntimeError(f"phase {number}, {phase}, fails again and again")

    def _make_equal(self, root: str) -> None:
        mykv.broadcast_states(self._trainer, int(root))

    def _attempt(self, call: Callable[[str], None], what: str) -> list[bool]:
        """Which ranks a call fails on."""
        error = ""
        try:
            call(what)
            mx.nd.waitall()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        clear_errors()
        for _ in range(3):  # who was not in the call has come here, while the others waited for it
            try:
                mykv.barrier()
                break
            except MXNetError as caught:
                error = error or f"at the barrier: {caught}"
        else:
            raise RuntimeError("the barrier fails again and again")
        clear_errors()
        if error:
            self.errors.append(error)
            if "given up after" in error:
                raise RuntimeError(f"waited: {error}")
        return MPI.COMM_WORLD.allgather(bool(error))

    def _data(self) -> Any:
        draw = np.random.RandomState(1000 * self.program.seed % 4000 + 10 * self._steps + self._rank)
        if self.net.is_sparse:
            return array(draw.randint(0, _WORDS, _BATCH).astype("float32"))
        return array(draw.uniform(-1, 1, (_BATCH, _INPUTS)).astype("float32"))

    def _step(self, what: str) -> None:
        around = mykv.join(self._trainer) if self.program.kind == "join" else contextlib.nullcontext()
        has_data = self.program.kind != "join" or self._steps % self._size != self._rank or bool(what)
        if self.program.kind == "deferred" and self._steps == 0:
            has_data = True
        with around:
            if has_data:
                self._train(what)

    def _train(self, what: str) -> None:
        if what == "weights file":
            self._load_other_weights()
        with autograd.record():
            out = self.net(self._data(), what != "unused")
            if what == "loss":
                raise ArithmeticError("planted in the loss")
            loss = (out**2).sum()
        if what != "stale":
            loss.backward()
        if what == "carries an error":
            fail(self.net.last.weight.grad())
        workers = self._size if self.program.kind.startswith("stock") else 1
        batch = (_BATCH + (what == "batch")) * workers
        self._optimizer.fails = what == "update"
        if what == "rate":
            self._trainer.set_learning_rate(_RATE / 2)
        try:
            self._update(batch)
        finally:
            self._optimizer.fails = False
            if what == "rate":
                self._trainer.set_learning_rate(_RATE)

    def _update(self, batch: int) -> None:
        if self.program.kind == "clipping":
            self._trainer.allreduce_grads()
            gradients = [one.grad() for one in structure(self.net).values()]
            gluon.utils.clip_global_norm(gradients, 2.0 * _BATCH, check_isfinite=False)
            self._trainer.update(batch)
        elif self.program.kind == "keys":
            self._push_keys()
        else:
            self._trainer.step(batch)

    def _push_keys(self) -> None:
        for name, parameter in structure(self.net).items():
            self._store.pushpull(name, parameter.grad())
        for parameter in structure(self.net).values():
            weight, gradient = (one.as_nd_ndarray() for one in (parameter.data(), parameter.grad()))
            mx.nd.sgd_update(weight, gradient, lr=0.01, wd=0.0, out=weight)  # without a workspace that others share

    def _load_other_weights(self) -> None:
        """As from a file of another network, which fails when some parameters are there."""
        for parameter in (self.net.first.weight, self.net.middle.weight):
            if parameter._data is not None:
                parameter._load_init(array(np.ones(parameter.shape, "float32")), [mx.cpu()])
        raise ValueError("planted: the file belongs to another network")

    def _wrong(self, what: str) -> Any:
        values = np.full(
            (3, 2) if what == "shape" else (3,), 1 + self._rank, "float64" if what == "dtype" else "float32"
        )
        return array(values)

    def _pushpull(self, what: str) -> None:
        self._store.pushpull("extra", self._wrong(what))

    def _allreduce(self, what: str) -> None:
        mykv.allreduce(self._wrong(what), name="extra")

    def _allgather(self, what: str) -> None:
        mykv.allgather(self._wrong(what))

    def _barrier(self, what: str) -> None:
        mykv.barrier()

    def _broadcast_parameters(self, what: str) -> None:
        mykv.broadcast_parameters(5 if what else self.net.collect_params())

    def _check_in_step(self, what: str) -> None:
        mykv.check_in_step([5] if what else self.net.collect_params())

    def _save(self, what: str) -> None:
        if self._trainer is not None and self._steps and ("store" in self.program.kind or self._rank == 0 or what):
            with tempfile.TemporaryDirectory() as directory:
                self._trainer.save_states(str(Path(directory) / ("none" if what else "") / "states"))

    def _load(self, what: str) -> None:
        if self._trainer is not None and self._steps and what:
            with tempfile.NamedTemporaryFile() as file:
                file.write(b"no states")
                file.flush()
                self._trainer.load_states(file.name)
        elif self._trainer is not None and self._steps and "store" in self.program.kind:
            with contextlib.suppress(MXNetError, OSError):
                self._trainer.load_states("/none")


def run(seed: int, store: Any) -> tuple[list[str], bool]:
    """Run one program; returns what was wrong, and whether it had mistakes."""
    program = drawn(seed, mykv.size())
    what = f"program {seed}, rank {mykv.rank()}, {program}"
    comm = MPI.COMM_WORLD
    digests = []
    for with_mistakes in (False, True):
        one = Run(program, store, with_mistakes)
        try:
            digests.append(one.all())
        except Exception as error:  # the ranks are not at the same place any more
            say(f"FAILED {what}: {type(error).__name__}: {error}; {with_mistakes=}; {one.errors}".replace("\n", " "))
            time.sleep(1.0)
            comm.Abort(3)
        if len(set(comm.allgather(digests[-1]))) > 1:
            return [f"{what}: the weights differ between ranks, {with_mistakes=}; {one.errors}"], True
    if digests[0] != digests[1] and not one.all_failed:
        return [f"{what}: the weights are not those of the undisturbed run; {one.errors}"], True
    return [], bool(program.mistakes)


def main() -> None:
    """Run programs."""
    mykv.init()
    store = mx.kv.create("mykv")
    loop(lambda seed: run(seed, store), _LIMIT)


if __name__ == "__main__":
    main()
