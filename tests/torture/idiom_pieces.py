"""The pieces of users' trainings: their beginnings, and their actions between steps."""

from __future__ import annotations

import random
from typing import Any

import kvstore_plugin as mykv
from harness.support import array

from . import pieces
from .course import Course
from .pieces import Adversarial, Values, dense, loss_of, parameters

from mxnet import autograd, gluon  # isort: skip

_RATE = 0.03


class Idioms(Course):
    """One run of a program that is drawn from idioms."""

    # How a training begins.

    def begin_plain(self, draw: random.Random) -> None:
        """The trainer comes first."""
        if self.program.is_deferred:
            self.net(self.data())
        self.make_trainer()

    def begin_held(self, draw: random.Random) -> None:
        """The list of gradient arrays is older than the trainer."""
        if self.program.is_deferred:
            self.net(self.data())
        self.hold()
        self.make_trainer()

    def begin_recorded(self, draw: random.Random) -> None:
        """The trainer is created when the first forward has been recorded."""
        with autograd.record():
            loss = loss_of(self.net, self.data())
        if draw.random() < 0.3:
            self.hold()
        self.make_trainer()
        loss.backward()
        self.step(draw, draw.random() < 0.3)

    def begin_written(self, draw: random.Random) -> None:
        """The trainer is created after the first backward."""
        if draw.random() < 0.3:
            self.backward()
        self.backward()
        if draw.random() < 0.5:
            self.hold()
        self.make_trainer()
        self.step(draw)

    def begin_evaluated(self, draw: random.Random) -> None:
        """A forward that is not recorded comes before the trainer."""
        self.net(self.data()).asnumpy()
        self.make_trainer()

    def begin_probed(self, draw: random.Random) -> None:
        """A backward whose gradients nobody uses comes before the trainer."""
        self.backward()
        self.make_trainer()

    def begin_frozen(self, draw: random.Random) -> None:
        """A part of the network is frozen when the trainer is created."""
        self.net(self.data())
        self.refreeze(parameters(self.net.body), "null")
        self.make_trainer()

    # Steps.

    def do_step(self, draw: random.Random) -> None:
        """An ordinary step, sometimes with other work between forward and backward or after it."""
        with autograd.record():
            loss = loss_of(self.net, self.data())
        if draw.random() < 0.2:
            self.net(self.data()).asnumpy()
        self.disturb("backward")
        loss.backward()
        if draw.random() < 0.2:
            self.net(self.data()).asnumpy()
        self.step(draw, draw.random() < 0.2)

    def do_unused(self, draw: random.Random) -> None:
        """A step without the layer in the middle."""
        if self.program.form == "stock on the store" or self.program.option("clip_global_norm"):
            return  # MXNet pushes and counts old gradients there
        if self.program.form == "stock":  # a sum of a step that was left out would be summed again, as by any store
            self.do_step(draw)
        self.backward(uses_middle=False)
        self.step(draw, ignore_stale_grad=True)

    def do_losses(self, draw: random.Random) -> None:
        """The backward of two losses."""
        with autograd.record():
            both = [loss_of(self.net, self.data()) for _ in range(2)]
        autograd.backward(both)
        self.step(draw)

    def do_accumulated(self, draw: random.Random) -> None:
        """Gradients of several batches are added by grad_req 'add'."""
        trained = [one for one in parameters(self.net) if one.grad_req == "write"]
        self.refreeze(trained, "add")
        for _ in range(draw.choice([1, 2])):
            for _ in range(draw.choice([1, 2, 3])):
                self.backward()
            self.step(draw)
        if draw.random() < 0.8:
            self.refreeze(trained, "write")

    def do_accumulated_sums(self, draw: random.Random) -> None:
        """allreduce_grads() after each of several backwards with grad_req 'add', and one update()."""
        if self.program.form != "own" or self.program.option("gradients_after_allreduce") == "sum":
            return  # a sum would be multiplied again by the number of workers
        trained = [one for one in parameters(self.net) if one.grad_req != "null"]
        self.refreeze(trained, "add")
        self.zero(trained)
        trainer = self.trainers[0][0]
        for _ in range(draw.choice([2, 3])):
            self.backward()
            trainer.allreduce_grads()
        if self.is_alone and self.program.option("clip_global_norm"):
            pieces.clip_norm(self.gradients(), self.program.option("clip_global_norm") * pieces.ROWS)
        trainer.update(self.batch)
        self.refreeze(trained, "write")

    def do_skipped(self, draw: random.Random) -> None:
        """All workers leave out the update of a step, as after an overflow."""
        if self.program.is_on_store:
            return
        for _ in range(draw.choice([1, 1, 2])):
            self.backward()
            self.trainers[0][0].allreduce_grads()
            self.forget()
        if draw.random() < 0.5:
            self.do_step(draw)

    def do_left_out(self, draw: random.Random) -> None:
        """All workers leave out a whole step."""
        self.backward()
        self.forget()
        self.do_step(draw)

    def do_clipped(self, draw: random.Random) -> None:
        """Gradients are clipped by value, through the list that the program holds or a new one."""
        limit = draw.choice([0.3, 1.0]) / self.sums * pieces.ROWS / 12

        def change(gradients: list) -> None:
            for one in self.held if self.held and len(self.held) == len(gradients) else gradients:
                one[:] = one.clip(-limit, limit)

        self._changed(draw, change)

    def do_clipped_norm(self, draw: random.Random) -> None:
        """Gradients are clipped by their norm."""
        limit = draw.choice([0.5, 3.0]) / self.sums

        def change(gradients: list) -> None:
            use_held = bool(self.held) and len(self.held) == len(gradients)
            pieces.clip_norm(self.held if use_held else gradients, limit)

        self._changed(draw, change)

    def _changed(self, draw: random.Random, change: Any) -> None:
        if self.program.is_on_store:
            return
        self.backward()
        self.update(change)

    def do_scaled(self, draw: random.Random) -> None:
        """The program multiplies its own gradients before the step."""
        self.backward()
        for one in self.held or self.gradients():
            one[:] = one * 0.5
        self.step(draw)

    def do_zeroed(self, draw: random.Random) -> None:
        """Gradients are set to zero before the backward."""
        self.zero(parameters(self.net))
        self.do_step(draw)

    def do_all_frozen(self, draw: random.Random) -> None:
        """Steps in which no parameter is trained."""
        trained = [one for one in parameters(self.net) if one.grad_req != "null"]
        self.refreeze(trained, "null")
        for _ in range(draw.choice([1, 2, 3])):
            self.net(self.data())
            self.step(draw)
        self.refreeze(trained, "write")

    # Between steps.

    def do_hold(self, draw: random.Random) -> None:
        """The list of gradient arrays is created anew."""
        self.hold()

    def do_rate(self, draw: random.Random) -> None:
        """Another learning rate."""
        if not self.program.schedule:
            self.trainers[0][0].set_learning_rate(draw.choice([_RATE, _RATE / 3]))

    def do_set_data(self, draw: random.Random) -> None:
        """Weights are replaced."""
        for one in draw.sample(parameters(self.net), 2):
            one.set_data(one.data(self.device) * 0.5)

    def do_written_weights(self, draw: random.Random) -> None:
        """Weights are clipped in place."""
        for one in parameters(self.net):
            one.data(self.device)[:] = one.data(self.device).clip(-0.4, 0.4)

    def do_best(self, draw: random.Random) -> None:
        """Weights are saved, and restored after a step."""
        best = [one.data(self.device).copy() for one in parameters(self.net)]
        self.do_step(draw)
        for one, values in zip(parameters(self.net), best):
            one.set_data(values)

    def do_load(self, draw: random.Random) -> None:
        """Weights come from a file."""
        file = str(self.folder() / "parameters")
        if self.rank == 0:
            self.net.save_parameters(file)
        self.do_step(draw)
        self.barrier()
        self.net.load_parameters(file, ctx=self.device)

    def do_freeze(self, draw: random.Random) -> None:
        """A part of the network is frozen."""
        self.refreeze(parameters(draw.choice([self.net.body, self.net.middle, self.net.body[0]])), "null")

    def do_unfreeze(self, draw: random.Random) -> None:
        """All parameters are trained again."""
        self.refreeze([one for one in parameters(self.net) if one.grad_req == "null"], "write")

    def do_new_head(self, draw: random.Random) -> None:
        """Another output layer, with a trainer for it or for all."""
        with pieces.scope(self.net):
            self.net.output = dense(draw.choice([2, 3]), 5, self.dtype, False)
        self._initialize(self.net.output, draw.randrange(1000))
        self._hybridize(self.net.output)
        only = parameters(self.net.output) if draw.random() < 0.4 else None
        if draw.random() < 0.3:
            self.hold()
        if draw.random() < 0.3:
            self.backward()
        self.make_trainer(only)
        self.hold()

    def do_new_trainer(self, draw: random.Random) -> None:
        """A new trainer for the same network, with the same optimizer or a new one."""
        if draw.random() < 0.3:
            self.backward()
        self.make_trainer(optimizer=self.optimizer if draw.random() < 0.4 else None)

    def do_second_trainer(self, draw: random.Random) -> None:
        """One more trainer that shares parameters, and perhaps its optimizer, with the first."""
        part = draw.choice([self.net.output, self.net.body, self.net])
        shared = self.optimizer if draw.random() < 0.4 else None
        self.trainers = [*self.trainers[:1], self.new_trainer(parameters(part), shared)]
        self.do_step(draw)
        self.do_step(draw)

    def do_resume(self, draw: random.Random) -> None:
        """Weights and states are saved, and a new network and a new trainer continue from them."""
        folder = self.folder()
        trainer, given = self.trainers[0]
        if len(given) != len(parameters(self.net)) or any(one.grad_req == "null" for one in given):
            return
        self.do_step(draw)
        self.trainers = self.trainers[:1]
        if self.rank == 0:
            self.net.save_parameters(str(folder / "parameters"))
        if self.rank == 0 or self.program.is_on_store:
            trainer.save_states(str(folder / "states"))
        self.barrier()
        if draw.random() < 0.7:
            units = self.net.output._units
            self.net = self.new_net(draw.randrange(1000))
            if units != self.net.output._units:
                with pieces.scope(self.net):
                    self.net.output = dense(units, 5, self.dtype, False)
                self._initialize(self.net.output, 1)
        self.net.load_parameters(str(folder / "parameters"), ctx=self.device)
        self.make_trainer()
        self.trainers[0][0].load_states(str(folder / "states"))
        self.optimizer = self.trainers[0][0].optimizer
        self.barrier()
        self.hold()

    def do_reinitialize(self, draw: random.Random) -> None:
        """The network is reinitialized, with a new trainer."""
        values = Values(draw.randrange(1000))
        self.net.initialize(values, ctx=self.device, force_reinit=True)
        self.hold()

    def do_moved(self, draw: random.Random) -> None:
        """reset_ctx to the device where the network is."""
        self.move(self.net)
        self.hold()

    def do_rehybridized(self, draw: random.Random) -> None:
        """Change the hybridization of the network."""
        if self.is_hybrid:
            self.net.hybridize(draw.random() < 0.7, static_alloc=draw.random() < 0.5)

    def do_saliency(self, draw: random.Random) -> None:
        """The gradient of a loss by the input, which also writes those of the parameters."""
        data = self.data()
        data.attach_grad()
        pieces.backward(self.net, data)
        data.grad.asnumpy()
        self.forget()
        self.do_step(draw)

    # Children.

    def do_child(self, draw: random.Random) -> None:
        """A child runs forward and backward on its copy of the network, between backward and step or before them."""
        before = draw.random() < 0.3
        values = self.numbers()
        if not before:
            self.backward()
        if not self.is_alone:
            pieces.trained_in_child(self.net, values, self.device)
        if before:
            self.backward()
        self.step(draw)

    def do_loader(self, draw: random.Random) -> None:
        """Child processes that load data compute gradients of the network."""
        values, workers = self.numbers(), draw.choice([1, 2])  # drawn by the reference too, which continues to draw
        if self.is_alone or self.program.hybrid == "static":
            batches = [array(values, ctx=self.device)]
        else:
            rows = Adversarial(self.net, values, self.device)
            loader = gluon.data.DataLoader(rows, batch_size=len(values), num_workers=workers)
            batches = [array(one.asnumpy(), ctx=self.device) for one in loader]
        for one in batches:
            self.backward(one)
            self.step(draw)

    def do_collective(self, draw: random.Random) -> None:
        """Another collective operation of the workers."""
        values = array(self.numbers()[0])
        if not self.is_alone:
            mykv.allreduce(values, name="metric")
