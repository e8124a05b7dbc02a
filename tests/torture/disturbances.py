"""Local work of one worker while all train: it involves no collective operation."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import multiprocessing
import random
import tempfile
import threading
import time
from pathlib import Path

import kvstore_plugin as mykv
import numpy as np
from harness.support import array, fail, mx

from . import pieces
from .course import Course
from .pieces import Net, Values, parameters

from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon import nn  # isort: skip

_kept: collections.deque = collections.deque(maxlen=60)  # longer than a program
_MODULES = ["sqlite3", "xml.dom.minidom", "decimal", "asyncio", "email.mime.text", "unittest.mock"]


class Disturbance:
    """This worker's work besides a course.

    Parameters
    ----------
    course : Course
    chance : random.Random
        Of this worker.
    """

    def __init__(self, course: Course, chance: random.Random) -> None:
        self._course, self._chance = course, chance
        self._threads: list[threading.Thread] = []
        self._often = chance.choice([0.2, 0.5, 0.9])
        self._acts = [name for name in dir(self) if name.startswith("do_")]
        if chance.random() < 0.6:  # a few kinds, often
            self._acts = chance.sample(self._acts, chance.randint(1, 4))
        self._collects = chance.choice(["", "", "never", "always"])
        self._where = ""
        self.done: list[str] = []

    def __enter__(self) -> Disturbance:
        self._thresholds = gc.get_threshold()
        if self._collects == "never":
            gc.disable()
        elif self._collects == "always":
            gc.set_threshold(50, 2, 2)
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.set_threshold(*self._thresholds)
        self._join()

    def __call__(self, where: str) -> None:
        """Do a random action, or nothing."""
        while self._chance.random() < self._often:
            name = self._chance.choice(self._acts)
            self._where = where
            self.done.append(f"{where}: {name[3:]}")
            getattr(self, name)()
            if self._chance.random() < 0.5:
                return

    def _join(self) -> None:
        for one in self._threads:
            one.join()
        self._threads.clear()

    def do_collect(self) -> None:
        """Collect garbage."""
        gc.collect()

    def do_keep(self) -> None:
        """Keep objects of the training alive."""
        course = self._course
        _kept.append((list(course.trainers), course.net, list(course.held), course.optimizer))

    def do_forget(self) -> None:
        """Drop the kept objects."""
        _kept.clear()

    def do_backward(self) -> None:
        """Compute an unrelated gradient."""
        x = array(np.arange(3, dtype="float32"))
        x.attach_grad()
        with autograd.record():
            y = (x * x).sum()
        y.backward()
        if self._chance.random() < 0.3:
            _kept.append((x, y))

    def do_other_network(self) -> None:
        """Train another network without a store."""
        net = Net("float32", self._chance.random() < 0.5)
        net.initialize(Values(5))
        data = array(pieces.numbers(1, 4, "float32"))
        pieces.backward(net, data)
        trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
        trainer.step(4)

    def do_saliency(self) -> None:
        """The gradient of the network by its input, without those of its parameters."""
        # Between forward and backward MXNet loses what it has recorded of a BatchNorm.
        if self._is_ready() and self._where in ("phase", "step"):
            data = array(pieces.numbers(1, 4, self._course.dtype), ctx=self._course.device)
            data.attach_grad()
            with autograd.record(train_mode=False):
                loss = pieces.loss_of(self._course.net, data)
            autograd.grad(loss, [data], train_mode=False)[0].asnumpy()

    def do_evaluate(self) -> None:
        """Evaluate the network."""
        # A static graph whose parameters were recreated computes wrong gradients, even in one process.
        if self._is_ready() and not (self._where == "trainer" and self._course.program.hybrid == "static"):
            data = array(pieces.numbers(1, 4, self._course.dtype), ctx=self._course.device)
            self._course.net(data).asnumpy()

    def do_move(self) -> None:
        """reset_ctx to the device where the network is, which forgets gradients, or cast to the dtype that it has."""
        net = self._course.net
        weights = [one for one in parameters(net) if one.grad_req != "null"] if self._is_ready() else []
        if self._where == "phase" and not any(one.grad_req == "add" or one.data()._fresh_grad for one in weights):
            if weights and self._chance.random() < 0.7:
                self._course.move(net)
            elif weights:
                net.cast(self._course.dtype)

    def do_copy(self) -> None:
        """Copy the network, like a program that keeps the best one."""
        if self._is_ready():
            other = pieces.copied(self._course.net)
            # MXNet copies values to cpu(0), but keeps the device's name.
            if other is not None and self._course.device == mx.cpu(0) and self._chance.random() < 0.5:
                data = array(pieces.numbers(1, 4, self._course.dtype), ctx=self._course.device)
                other(data).asnumpy()
            if self._chance.random() < 0.5:
                _kept.append(other)

    def do_save(self) -> None:
        """Write local files."""
        if self._is_ready():
            file = Path(tempfile.gettempdir()) / f"own{mykv.rank()}"
            self._course.net.save_parameters(str(file))
            trainer = self._course.trainers[0][0] if self._course.trainers else None
            if trainer is not None and not self._course.program.is_on_store:
                trainer.save_states(str(file))

    def do_read(self) -> None:
        """Read attributes."""
        course = self._course
        for one in parameters(course.net) if self._is_ready() else []:
            one.data(course.device).asnumpy()
            if one.grad_req != "null":
                one.grad(course.device).asnumpy()
        mykv.statistics()
        if self._chance.random() < 0.5:
            mx.nd.waitall()

    def do_wrong_constructor(self) -> None:
        """Create an object with a wrong argument, and catch the error."""
        # Not a DistributedTrainer: all workers create it together, so a failure fails the others' next call. Not a
        # store: all workers must create the same stores, even if a constructor fails.
        net = Net("float32", False)
        net.initialize()
        wrong = [
            lambda: mykv.SyncBatchNorm(num_devices=2),
            lambda: mykv.DistributedOptimizer("sgd"),
            lambda: gluon.Trainer(net.collect_params(), "no such optimizer", kvstore="mykv"),
            lambda: gluon.Trainer([1, 2], "sgd", kvstore="mykv"),
            lambda: mx.kv.create("mykw"),
        ]
        try:
            self._chance.choice(wrong)()
        except Exception:
            return
        raise AssertionError("a wrong argument was taken")

    def do_error(self) -> None:
        """Cause an MXNet error, and catch it."""
        with contextlib.suppress(mx.MXNetError, ValueError, TypeError):
            if self._chance.random() < 0.5:
                mx.nd.dot(mx.nd.ones((2, 3)), mx.nd.ones((2, 3))).asnumpy()
            else:
                failed = array(np.zeros(3, "float32"))
                fail(failed)
                failed.asnumpy()

    def do_fork(self) -> None:
        """Fork a child, which ends, collects garbage, or trains its copy of the network."""
        self._join()
        course, kind = self._course, self._chance.choice(["nothing", "collect", "train"])
        trains = kind == "train" and self._is_ready() and course.program.norm != "sync"
        trains = trains and any(one.grad_req != "null" for one in parameters(course.net))  # else MXNet has no backward

        def child() -> None:
            if kind == "collect":
                gc.collect()
            if trains:
                pieces.backward(course.net, array(pieces.numbers(1, 4, course.dtype) * 100, ctx=course.device))
                mx.nd.waitall()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(100)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"the child ended with {process.exitcode}")

    def do_thread(self) -> None:
        """Run a thread for a while."""
        end = time.monotonic() + self._chance.uniform(0, 0.1)

        def work() -> None:
            while time.monotonic() < end:
                x = mx.nd.ones((3,)) * 2
                x.asnumpy()
                gc.collect(0)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def do_sleep(self) -> None:
        """Sleep."""
        time.sleep(self._chance.random() ** 3 * 0.1)

    def do_import(self) -> None:
        """Import a module."""
        importlib.import_module(self._chance.choice(_MODULES))

    def do_layers(self) -> None:
        """Create layers, whose names MXNet 1.9 numbers."""
        for _ in range(self._chance.choice([1, 9])):
            nn.Dense(1)

    def do_local_store(self) -> None:
        """Use a store of MXNet's within this process."""
        store = mx.kv.create("local")
        store.init("a", mx.nd.ones(3))
        store.push("a", mx.nd.ones(3))
        store.pull("a", mx.nd.ones(3))

    def _is_ready(self) -> bool:
        net = self._course.net
        return net is not None and all(one._data is not None for one in parameters(net))
