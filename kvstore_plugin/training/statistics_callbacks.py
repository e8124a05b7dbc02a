"""Shows the statistics during training: in a progress bar, in TensorBoard, or in the log of MXNet's Estimator."""

from __future__ import annotations

from typing import Any

from mxnet.gluon.contrib.estimator import event_handler

from ..compat.arguments import whole_number
from ..world import process
from ..world.process_set import global_process_set
from . import statistics as counters
from . import statistics_report as report


class StatisticsCallback:
    """Shows the statistics since it has last shown them. Call it once after each batch.

    It can also be a ``batch_end_callback`` of Module.fit().

    Parameters
    ----------
    target : object
        Output: a progress bar of tqdm (an object with ``set_postfix_str``), a SummaryWriter of mxboard (an
        object with ``add_scalar``), or a function that takes the text.
    every : int, optional
        Show after this number of calls.

    Raises
    ------
    TypeError, ValueError
        `target` is of another type, or `every` is not a whole number of at least 1.

    Examples
    --------
    >>> show = mykv.StatisticsCallback(print, every=10)
    >>> for images, labels in loader:
    ...     with autograd.record():
    ...         loss = loss_of(net(images), labels)
    ...     loss.backward()
    ...     trainer.step(len(images))
    ...     show()
    >>> show.show()  # once more, at the end
    """

    def __init__(self, target: Any, every: int = 10) -> None:
        if not callable(target) and not hasattr(target, "set_postfix_str") and not hasattr(target, "add_scalar"):
            raise TypeError(
                f"target must have the method set_postfix_str or add_scalar, or be a function, not "
                f"{type(target).__name__}."
            )
        self._target = target
        self._every = whole_number("every", every, 1)
        self._calls = 0
        self._generation = -1
        self._before: dict = {}

    def __call__(self, *_batch: Any) -> None:
        """Count a batch, and show the statistics if they are due."""
        self._calls += 1
        if self._calls % self._every == 0:
            self.show()

    def show(self) -> None:
        """Show the statistics now."""
        now = counters.read(process.core)
        known = self._before if self._generation == process.generation else counters.began()
        self._before, self._generation = now, process.generation
        numbers = counters.shown(counters.since(now, known), process.core, global_process_set)
        target = self._target
        if hasattr(target, "set_postfix_str"):
            target.set_postfix_str(report.line(numbers))
        elif hasattr(target, "add_scalar"):
            for tag, value in _scalars(numbers).items():
                target.add_scalar(f"mykv/{tag}", value, global_step=self._calls)
        else:
            target(report.line(numbers))


class StatisticsHandler(event_handler.BatchEnd):
    """An event handler of MXNet's Estimator that shows the statistics at intervals.

    Parameters
    ----------
    target : object, optional
        As for `StatisticsCallback`. By default rank 0 logs with the estimator's logger.
    every : int, optional
        Show after this number of batches.

    Examples
    --------
    >>> from mxnet.gluon.contrib.estimator import Estimator
    >>> mx.npx.reset_np()  # the Estimator of MXNet 1.9.1 takes arrays of mx.nd only
    >>> net = gluon.nn.Dense(10, in_units=64)
    >>> net.initialize()
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "adam")
    >>> fitting = Estimator(net, loss_of, trainer=trainer)
    >>> fitting.fit(loader, epochs=1, event_handlers=[mykv.StatisticsHandler(every=20)])
    """

    def __init__(self, target: Any = None, every: int = 50) -> None:
        self._callback = StatisticsCallback(self._log if target is None else target, every)
        self._logger: Any = None

    def batch_end(self, estimator: Any, *_args: Any, **_named: Any) -> None:
        """Called by the Estimator after each batch."""
        self._logger = estimator.logger
        self._callback()

    def _log(self, text: str) -> None:
        if process.rank() == 0:
            self._logger.info("mykv: %s", text)


def _scalars(numbers: dict[str, Any]) -> dict[str, float]:
    """Numbers for curves; times in ms."""
    steps = max(numbers["steps"], 1)
    scalars = {
        "waited_ms_a_step": 1e3 * numbers["waited_in_steps"] / steps,
        "communication_ms_a_step": 1e3 * numbers["communication"] / steps,
        "update_ms_a_step": 1e3 * numbers["update"] / steps,
        "overlapped": numbers["overlapped"],
        "slowest_rank": numbers["late"][0]["rank"] if numbers["late"] else None,
    }
    return {tag: value for tag, value in scalars.items() if value is not None}
