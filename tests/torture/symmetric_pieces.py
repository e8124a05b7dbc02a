"""More pieces of trainings, in which all workers do the same: stages, copies, process sets, stores, join."""

from __future__ import annotations

import contextlib
import pickle
import random

import kvstore_plugin as mykv
import numpy as np
from harness.support import array, mx
from mpi4py import MPI

from . import pieces
from .idiom_pieces import Idioms
from .pieces import Values, parameters


class Symmetric(Idioms):
    """One run of a program that all workers run alike."""

    def do_stage(self, draw: random.Random) -> None:
        """The network is reinitialized, with a new trainer."""
        if draw.random() < 0.7:
            self.net.initialize(Values(draw.randrange(1000)), ctx=self.device, force_reinit=True)
        else:
            self.net = self.new_net(draw.randrange(1000))
            self.net(self.data())
        self.make_trainer()
        self.hold()
        for _ in range(draw.choice([1, 2])):
            self.do_step(draw)

    def do_cast(self, draw: random.Random) -> None:
        """The network gets another dtype, and a new trainer."""
        if self.program.norm or not pieces.takes_float64(self.program.optimizer):
            return
        self.dtype = "float64" if self.dtype == "float32" else "float32"
        self.net.cast(self.dtype)
        self.make_trainer()
        self.hold()

    def do_copied(self, draw: random.Random) -> None:
        """All workers copy the network, and some continue with the copy."""
        other = pieces.copied(self.net)
        are_copied = other is not None  # on a worker that has moved its network, it does not count as run hybridized
        if not self.is_alone:
            are_copied = MPI.COMM_WORLD.allreduce(are_copied, MPI.LAND)
        self.disturb("phase")
        if not are_copied:
            return
        self.move(other)  # MXNet copies to cpu(0)
        other(self.data()).asnumpy()
        if draw.random() < 0.5:
            self.net = other
            self.make_trainer()
            self.hold()

    def do_pickled(self, draw: random.Random) -> None:
        """A new trainer gets a pickled copy of the optimizer."""
        kept, self.optimizer.param_dict = self.optimizer.param_dict, {}
        try:
            again = pickle.loads(pickle.dumps(self.optimizer))
        finally:
            self.optimizer.param_dict = kept
        self.make_trainer(optimizer=again)

    def do_evaluated(self, draw: random.Random) -> None:
        """The network is evaluated."""
        self.net(self.data()).asnumpy()

    def do_process_set(self, draw: random.Random) -> None:
        """A process set, in which some workers sum something or train another network."""
        size = mykv.size()  # even in the single-process run, which all workers make
        members = sorted(draw.sample(range(size), draw.choice([1, size - 1])))
        part = mykv.add_process_set(members)
        trains = draw.random() < 0.5
        values = self.numbers()
        self.disturb("phase")
        if part.included() and trains:
            net = pieces.Net(self.dtype, False)
            net.initialize(Values(3), ctx=self.device)
            optimizer = pieces.optimizer(0, "")
            trainer = mykv.DistributedTrainer(net.collect_params(), optimizer, process_set=part)
            for _ in range(2):
                pieces.backward(net, array(values, ctx=self.device))
                self.disturb("step")
                trainer.step(1)
            mx.nd.waitall()
        elif part.included():
            mykv.allreduce(array(values[0]), process_set=part).asnumpy()
        mykv.remove_process_set(part)

    def do_store(self, draw: random.Random) -> None:
        """A store of the program's own."""
        store = mx.kv.create("mykv")
        array_of = [array(self.numbers()[0]) for _ in range(2)]
        store.broadcast("a", array_of[0], array_of[0])
        self.disturb("phase")
        store.pushpull("b", array_of[1], out=array_of[1])
        # The sum goes into the weights, so that the comparison sees it.
        self.net.output.bias.set_data(self.net.output.bias.data(self.device) + 0.01 * float(array_of[1].asnumpy()[0]))

    def do_sums(self, draw: random.Random) -> None:
        """Collective operations without a name."""
        for _ in range(draw.choice([1, 3])):
            what = draw.choice(["allreduce", "broadcast_parameters", "check", "object", "barrier", "gather", "layer"])
            if what == "allreduce":
                mykv.allreduce(array(self.numbers()[0])).asnumpy()
            elif what == "broadcast_parameters":
                mykv.broadcast_parameters(self.net.collect_params())
            elif what == "check":
                mykv.check_in_step(self.net.collect_params())
            elif what == "object":
                mykv.broadcast_object({"a": [self.rank]}, 0)
            elif what == "gather":
                mykv.allgather(array(self.numbers()))
            elif what == "layer":
                self._normalized()
            else:
                mykv.barrier()
            self.disturb("phase")

    def _normalized(self) -> None:
        layer = mykv.SyncBatchNorm(in_channels=pieces.INPUTS)
        layer.initialize(ctx=self.device)
        with mx.autograd.record():
            out = layer(array(self.numbers().astype("float32"), ctx=self.device))
        out.asnumpy()

    def do_join(self, draw: random.Random) -> None:
        """Workers make different numbers of steps."""
        if self.program.form != "own" or self.program.norm or len(self.trainers) > 1:
            return
        counts = [draw.choice([1, 2, 3]) for _ in range(self.size)]
        with contextlib.nullcontext() if self.is_alone else mykv.join(self.trainers[0][0]):
            for number in range(max(counts)):
                values = self.data()
                if number < counts[self.rank]:
                    self.backward(values)
                    self.disturb("step")
                    self.trainers[0][0].step(self.batch)

    def do_dropped(self, draw: random.Random) -> None:
        """Trainers and arrays are dropped, and others made."""
        self.trainers, self.held, self.optimizer = [], [], None
        self.make_trainer()

    def do_loaded(self, draw: random.Random) -> None:
        """Parameters are given as numpy's arrays."""
        for one in parameters(self.net):
            if one.grad_req != "null":
                values = np.full(one.shape, 0.1 + draw.random() * 0.1, self.dtype)
                one.set_data(array(values, ctx=self.device))
