"""The measurements that need MXNet, for any peer; a peer's own file reduces an array and creates a trainer."""

from __future__ import annotations

import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .. import models
from .job import Job, Series, timed
from .meeting import Meeting

SGD = {"learning_rate": 0.01, "momentum": 0.9}
OPTIMIZERS = {"sgd": SGD, "adam": {"learning_rate": 0.001}}


class Peer:
    """The interface of a peer.

    Attributes
    ----------
    rank, size : int
    reduces : bool
        Whether there is any communication.
    averages : bool
        Whether allreduce_grads() of its own trainer averages over the ranks; otherwise it sums.
    begins_alike : bool
        Whether all parameters start from the ranks' initial values.
    """

    rank = 0
    size = 1
    reduces = True
    averages = False
    begins_alike = True

    def pushpull(self, key: str, array: Any) -> None:
        """Start to sum `array` over all ranks, in place."""
        raise NotImplementedError

    def trainer(self, params: list[Any], flavour: str, optimizer: str = "sgd") -> gluon.Trainer:
        """A trainer with an optimizer of OPTIMIZERS.

        `flavour` is 'stock', 'own' (the peer's own class), or 'store' or 'stock store' (they update on the store).
        """
        raise NotImplementedError


def main(peer: Peer, job: Job) -> None:
    """Measure the job's cases with this peer."""
    mx.random.seed(1)
    measure = Measurements(peer)
    kinds = {
        "pushpull": measure.pushpull,
        "gradients": measure.gradients,
        "update": measure.update,
        "training": measure.training,
        "stream": measure.stream,
        "breakdown": measure.breakdown,
        "late": measure.late,
        "idle": measure.idle,
        "python": measure.python,
        "memory": measure.memory,
    }
    job.run(peer.rank, kinds)


class Measurements:
    """One function per kind of case; each yields (series, numbers)."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def pushpull(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of one pushpull of 'nbytes' bytes in place, from the call to wait_to_read()."""
        dtype = case.get("dtype", "float32")
        array = mx.nd.zeros((case["nbytes"] // np.dtype(dtype).itemsize,), dtype=dtype)

        def prepare() -> None:
            write(array, self._peer.rank + 1)
            mx.nd.waitall()

        def work() -> None:
            self._peer.pushpull(case["id"], array)
            array.wait_to_read()

        times = timed(case, meeting, prepare, work)
        self._check(array, case, averaged=False)
        yield "time", times

    def gradients(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of allreduce_grads() for the gradients of 'model'; with 'step', of step()."""
        params = parameters(case)
        trainer = self._peer.trainer(params, case["flavour"])
        gradients = [parameter.list_grad()[0] for parameter in params]
        waits_for_update = False  # allreduce_grads() was called, which programs follow with update()

        def prepare() -> None:
            if waits_for_update:
                trainer.update(1)
            for parameter in params:
                write_gradient(parameter, self._peer.rank + 1)
            mx.nd.waitall()

        def work() -> None:
            nonlocal waits_for_update
            if case.get("step"):
                trainer.step(1)
            else:
                trainer.allreduce_grads()
                waits_for_update = True
            mx.nd.waitall()

        times = timed(case, meeting, prepare, work)
        for gradient in (gradients[0], gradients[-1]):
            self._check(gradient, case, averaged=self._peer.averages and case["flavour"] == "own")
        yield "time", times

    def update(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of step() with gradients ready, and bytes of the optimizer's states on each worker afterwards."""
        params = parameters(case)
        trainer = self._peer.trainer(params, case["flavour"], case["optimizer"])

        def prepare() -> None:
            for parameter in params:
                write_gradient(parameter, 1)
            mx.nd.waitall()

        def work() -> None:
            trainer.step(1)
            mx.nd.waitall()

        times = timed(case, meeting, prepare, work)
        if self._peer.begins_alike:
            self._check_equal(params)
        yield "time", times
        yield "state bytes", [float(state_bytes(trainer))]

    def training(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of whole training steps with this peer, alternating with steps of a second network alone."""
        distributed = Network(case, lambda params: self._peer.trainer(params, case["flavour"]))
        alone = Network(case, lambda params: gluon.Trainer(params, "sgd", SGD, kvstore=None))
        both = {"step": [], "alone": []}
        for iteration in range(case["warmup"] + case["iterations"]):
            for series, network in (("step", distributed), ("alone", alone)):
                begin = meeting.start()
                network.step()
                mx.nd.waitall()
                if iteration >= case["warmup"]:
                    both[series].append(time.perf_counter() - begin)
        yield from both.items()

    def stream(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds per step of training that waits only at the end of 'steps' steps, as training does.

        Alternates with the same network alone (compute), and with step() on ready gradients (communication and update).
        """
        made = {
            "step": Network(case, lambda params: self._peer.trainer(params, case["flavour"])),
            "compute": Network(case, lambda params: gluon.Trainer(params, "sgd", SGD, kvstore=None)),
        }
        trainer = made["step"].trainer
        gradients = [parameter.list_grad()[0] for parameter in trainer._params if parameter.grad_req != "null"]

        def communicate() -> None:
            for parameter in trainer._params:
                if parameter.grad_req != "null":
                    parameter.list_data()[0]._fresh_grad = True
            trainer.step(case["batch"])

        works = {"step": made["step"].step, "compute": made["compute"].step, "communication": communicate}
        times: dict[str, list[float]] = {name: [] for name in works}
        for iteration in range(case["warmup"] + case["iterations"]):
            for name, work in works.items():
                for gradient in gradients if name == "communication" else ():
                    write(gradient, 0)  # the weights stay
                mx.nd.waitall()
                begin = meeting.start()
                for _ in range(case["steps"]):
                    work()
                mx.nd.waitall()
                if iteration >= case["warmup"]:
                    times[name].append((time.perf_counter() - begin) / case["steps"])
        yield from times.items()

    def breakdown(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of the parts of a training step, each waited for separately, so that nothing overlaps."""
        network = Network(case, lambda params: self._peer.trainer(params, case["flavour"]))
        parts = {
            "forward and backward": network.backward,
            "allreduce": network.trainer.allreduce_grads,
            "update": lambda: network.trainer.update(case["batch"]),
        }
        times: dict[str, list[float]] = {name: [] for name in parts}
        for iteration in range(case["warmup"] + case["iterations"]):
            for name, part in parts.items():
                begin = meeting.start()
                part()
                mx.nd.waitall()
                if iteration >= case["warmup"]:
                    times[name].append(time.perf_counter() - begin)
        yield from times.items()

    def late(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Share of a core that rank 0 uses while it waits in pushpull, which the other ranks call 'seconds' later."""
        array = mx.nd.ones((1024,))
        self._peer.pushpull(case["id"], array)
        array.wait_to_read()
        shares = []
        for _ in range(case["iterations"]):
            begin = meeting.start()
            cpu = time.process_time()
            if self._peer.rank != 0:
                time.sleep(case["seconds"])
            self._peer.pushpull(case["id"], array)
            array.wait_to_read()
            if self._peer.rank == 0:
                shares.append((time.process_time() - cpu) / (time.perf_counter() - begin))
            else:
                shares.append(0.0)
        yield "share", shares

    def idle(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Share of a core that an initialized process uses in 'seconds' without work."""
        array = mx.nd.ones((1024,))
        self._peer.pushpull(case["id"], array)
        array.wait_to_read()
        shares = []
        for _ in range(case["iterations"]):
            begin, cpu = meeting.start(), time.process_time()
            time.sleep(case["seconds"])
            shares.append((time.process_time() - cpu) / (time.perf_counter() - begin))
        yield "share", shares

    def python(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Python's wall and thread time in step(), without MXNet's own update of the parameters."""
        params = parameters(case)
        trainer = self._peer.trainer(params, case["flavour"])
        trainer._update = lambda *args, **kwargs: None
        both = {"time": [], "cpu": []}
        for iteration in range(case["warmup"] + case["iterations"]):
            for parameter in params:
                write_gradient(parameter, 1)
            mx.nd.waitall()
            begin, cpu = meeting.start(), time.thread_time()
            trainer.step(1)
            if iteration >= case["warmup"]:
                both["time"].append(time.perf_counter() - begin)
                both["cpu"].append(time.thread_time() - cpu)
            mx.nd.waitall()
        yield from both.items()

    def memory(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Bytes of this process after some allreduces, each page divided by the number of processes that share it."""
        params = parameters(case)
        trainer = self._peer.trainer(params, case["flavour"])
        most = 0
        for _ in range(case["iterations"]):
            for parameter in params:
                write_gradient(parameter, 1)
            mx.nd.waitall()
            trainer.allreduce_grads()
            mx.nd.waitall()
            meeting.start()
            most = max(most, proportional_bytes())
            meeting.start()
        yield "bytes", [float(most)]

    def _check_equal(self, params: list[Any]) -> None:
        """Check the parameters: all elements started at 0 and had the same gradients."""
        values = {float(parameter.data().reshape((-1,))[place].asscalar()) for parameter in params for place in (0, -1)}
        if len(values) > 1 or values == {0.0}:
            raise ArithmeticError(f"The parameters were not all updated, or not alike: {sorted(values)}.")

    def _check(self, array: Any, case: dict[str, Any], averaged: bool) -> None:
        """Check a sum to which rank r has contributed r + 1."""
        if not self._peer.reduces:
            return
        expected = self._peer.size * (self._peer.size + 1) / 2 / (self._peer.size if averaged else 1)
        for value in array.reshape((-1,))[[0, -1]].asnumpy():
            if float(value) != expected:
                raise ArithmeticError(f"{case['id']}: the result holds {value}, but it must be {expected}.")


class Network:
    """A network of the model zoo on random images, with the same initial weights on all ranks."""

    def __init__(self, case: dict[str, Any], make_trainer: Any) -> None:
        self._net = getattr(gluon.model_zoo.vision, case["network"])()
        shape = (case["batch"], 3, case["pixels"], case["pixels"])
        self._images = mx.nd.random.uniform(shape=shape)
        self._labels = mx.nd.zeros((case["batch"],))
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        # Complete shapes without a forward pass, which would leave weights in a layout that some peers cannot take.
        self._net.infer_shape(self._images)
        self._net.initialize(mx.init.Xavier())
        self._net.hybridize(static_alloc=True, static_shape=True)
        params = [p for p in self._net.collect_params().values() if p.grad_req != "null"]
        self._batch = case["batch"]
        self.trainer = make_trainer(params)

    def backward(self) -> None:
        """Forward and backward."""
        with autograd.record():
            loss = self._loss(self._net(self._images), self._labels)
        loss.backward()

    def step(self) -> None:
        """Start one training step; returns before it is complete."""
        self.backward()
        self.trainer.step(self._batch)


def parameters(case: dict[str, Any]) -> list[gluon.Parameter]:
    """Initialized Parameters of zeros with the shapes of case['model']."""
    made = []
    for number, shape in enumerate(models.shapes_of(case["model"])):
        name = f"{case['id']}.{number}"
        made.append(gluon.Parameter(name, shape=shape, dtype=case.get("dtype", "float32"), init=mx.init.Zero()))
        made[-1].initialize()
    return made


def write(array: Any, value: float) -> None:
    """Set all elements; `array[:] = value` takes seven times the Python, too much for 10,000 arrays."""
    mx.nd._internal._set_value(src=float(value), out=array)


def write_gradient(parameter: gluon.Parameter, value: float) -> None:
    """Set all elements of a gradient and mark it as fresh, as backward does."""
    write(parameter.list_grad()[0], value)
    parameter.list_data()[0]._fresh_grad = True


def state_bytes(trainer: gluon.Trainer) -> int:
    """Bytes of the arrays that this process keeps for the optimizer."""
    store = getattr(trainer, "_store_optimizer", None) or getattr(trainer._kvstore, "_optimizer", None)
    updaters = [store.updater] if store is not None else trainer._updaters
    return sum(_bytes(state) for updater in updaters for state in updater.states.values())


def _bytes(state: Any) -> int:
    if isinstance(state, (tuple, list)):
        return sum(_bytes(one) for one in state)
    return 0 if state is None else state.size * np.dtype(state.dtype).itemsize


def proportional_bytes() -> int:
    """Bytes of memory of this process, from /proc: its Pss without that of files (proc(5), Linux 5.9 and later).

    Pages of libraries are shared with other processes of the machine, and do not count.
    """
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        fields = [line.split() for line in file]
    return sum(1024 * int(field[1]) for field in fields if field[0] in ("Pss_Anon:", "Pss_Shmem:"))
