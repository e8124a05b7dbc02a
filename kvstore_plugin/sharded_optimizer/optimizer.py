"""StoreOptimizer: MXNet's own optimizer, run by each worker on its share of the parameters.

An update is three consecutive operations of MXNet's engine, without Python in between: the sum of each gradient element
goes to its owner, the owner's updater changes its shard of the weight, and all workers get all shards. The updater
creates states only for its shards, so each of N workers holds 1/N of the states and does 1/N of the work
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, stages 1 and 2).

The weights are the same on all workers, even if the optimizers differ: all bits of an element come from one worker.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from copy import deepcopy
from typing import Any, Callable, Collection, Hashable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from ..compat import arrays
from ..compat.mxnet import MXNetError, NDArray, continue_counts, counted_together, mx, set_current_device
from ..coordination import operation, step_label
from ..world.process_set import ProcessSet
from . import partition, traits
from .partition import Shard, Size

# Size of a group of parameters that is cut into equal shares; about the size of a bucket of gradients.
_GROUP_BYTES = 16 << 20


class Member(NamedTuple):
    """One parameter in an update.

    Attributes
    ----------
    key : int or str
        The optimizer's key of the parameter, for multipliers, counters and states.
    gradient : NDArray
        This worker's gradient, of the shape and dtype of the weight.
    weights : sequence of NDArray
        The weight, which is read and written, and its copies on other devices, which are written.
    """

    key: Hashable
    gradient: NDArray
    weights: Sequence[NDArray]


class Reached(NamedTuple):
    """For a key in a step: the number of updates passed to the schedule, and the resulting rate."""

    count: int
    rate: float


class _Asked:
    """Replaces a learning rate schedule for one update: returns a cached rate, without a call of the schedule."""

    def __init__(self, schedule: Any, rate: float) -> None:
        self._schedule, self._rate = schedule, rate

    def __call__(self, _: int) -> float:
        return self._rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


class StoreOptimizer:
    """An optimizer whose work and states are divided over the workers of a process set.

    Parameters
    ----------
    process_set : ProcessSet
    optimizer : mxnet.optimizer.Optimizer
        Kept by reference: changes by the caller (learning rate, rescale_grad) take effect with the next update.
    number : int, optional
        Number of optimizers set on the store so far. The workers compare it, since some workers may have kept an
        earlier optimizer with its states.

    Attributes
    ----------
    process_set : ProcessSet
    checkpoints : int
        Number of calls that have saved or loaded the states.
    updater : mxnet.optimizer.Updater
        Its `states` are the states of this worker's shards, by key, and its `optimizer` is the optimizer in use.

    Raises
    ------
    TypeError, ValueError
        `optimizer` is not an optimizer, or cannot be divided.
    """

    def __init__(self, process_set: ProcessSet, optimizer: Any, number: int = 1) -> None:
        traits.check(optimizer)
        self.process_set = process_set
        self._number = number
        self.checkpoints = 0
        self.updater = mx.optimizer.get_updater(optimizer)
        self._shards: dict[Hashable, tuple[Shard, ...]] = {}
        self._shapes: dict[Hashable, tuple] = {}
        self._device_ids: set[int] = set()  # devices of all weights so far
        self._settings: list[str] = []
        self._labelled: tuple[Any, str] = (None, "")  # cache of label(): its inputs, and the label

    @property
    def optimizer(self) -> Any:
        """The optimizer in use; loading states may replace it."""
        return self.updater.optimizer

    @property
    def factor(self) -> float:
        """The optimizer's factor for gradients as a number; some optimizers of MXNet 2.0 convert it to an array."""
        return step_label.value_of(self.optimizer.rescale_grad)

    def set_again(self, number: int) -> None:
        """The store's set_optimizer() got this optimizer again, in call `number`.

        Before its first update it counts as new, since the earlier call may have failed on other workers.
        """
        if not self._shards:
            self._number = number

    def label(self, progress: tuple[int, float | None] | None = None) -> str:
        """Text that must be equal in the updates of all workers: factor of gradients, learning rate, optimizer and
        settings.

        The settings are those at the optimizer's first label; factor and learning rate are the current values.
        `progress` (traits.progress_of) may be given only for a whole step: workers may push single keys in different
        orders.
        """
        optimizer = self.optimizer
        state = (self.factor, step_label.learning_rate_of(optimizer), optimizer, progress)
        if state != self._labelled[0]:
            text = step_label.label(state[0], 1.0, state[1], "an update", progress)
            if self._labelled[0] is None or self._labelled[0][2] is not optimizer:
                self._settings = [*traits.settings(optimizer), f"set_optimizer() calls: {self._number}"]
            self._labelled = (state, step_label.BETWEEN.join([text, *self._settings]))
        return self._labelled[1]

    @property
    def keys(self) -> Collection[Hashable]:
        """The keys that have owners."""
        return self._shards.keys()

    def shards_of(self, key: Hashable) -> tuple[Shard, ...]:
        """The shards of a key, in the order of their elements; the same on all workers."""
        return self._shards[key]

    def shape_of(self, key: Hashable) -> tuple:
        """The shape of the whole weight of a key."""
        return self._shapes[key]

    def own_shard(self, key: Hashable) -> Shard | None:
        """The shard of a key that this worker updates, or None."""
        rank = self.process_set.rank()
        return next((shard for shard in self._shards[key] if shard.owner == rank), None)

    def assign(self, weights: Iterable[tuple[Hashable, NDArray]]) -> list[Hashable]:
        """Assign owners to keys without owners, and new owners to keys whose weight has changed its shape.

        Parameters
        ----------
        weights : iterable of (key, NDArray)
            The same keys in the same order on all workers. Pass all known keys in each call, since later calls do not
            change earlier owners.

        Returns
        -------
        list
            Keys with new owners, for `release` if another worker has not done the same.
        """
        new = {key: weight for key, weight in weights if self._shapes.get(key) != weight.shape}
        for key, weight in new.items():
            self._device_ids.add(weight.context.device_id)
            self.updater.states.pop(key, None)
        sizes = [_size_of(weight) for weight in new.values()]
        elementwise = traits.is_elementwise(self.optimizer)
        shards = dict(zip(new, partition.divide(sizes, self.process_set.size(), elementwise, _GROUP_BYTES)))
        shapes = {key: weight.shape for key, weight in new.items()}
        self._shards.update(shards)  # first: an exception of a signal handler leaves keys without owners, or all
        self._shapes.update(shapes)
        return list(new)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Remove the owners of some keys."""
        for key in keys:
            del self._shards[key], self._shapes[key]

    def clear(self) -> None:
        """Remove all owners and states."""
        self.release(list(self._shards))
        self.replace({}, None)

    def is_trained(self, key: Hashable) -> bool:
        """Whether a key may get gradients; True if its Parameter is unknown."""
        return getattr(self.optimizer.param_dict.get(key), "grad_req", None) != "null"

    def is_assigned(self, key: Hashable, weight: NDArray) -> bool:
        """Whether a key has owners, for a weight of this shape."""
        return self._shapes.get(key) == weight.shape

    def count_updates(self, keys: Iterable[Hashable], weight: NDArray) -> None:
        """Count other workers' updates of keys, on the device of a weight.

        Schedules and bias corrections depend on these counters, and a saved optimizer contains them.
        """
        set_current_device(self.optimizer, weight.context.device_id)
        for key in keys:
            self.optimizer._update_count(key)

    def counts_reached(
        self, updates: Sequence[tuple[ShardedUpdate, Collection[Hashable] | None]]
    ) -> dict[Hashable, Reached]:
        """The counts and rates that a single process would use for each key of a step.

        MXNet passes the largest count of all keys so far to the schedule; some optimizers first count several keys. A
        key that some steps leave out has a smaller count, so its rate depends on the order in which keys are counted.
        A worker's operations have another order. MXNet's FactorScheduler cannot go back to a smaller count, so the
        schedule is called here, with ascending counts, before the first update.

        Parameters
        ----------
        updates : sequence of (ShardedUpdate, collection of keys or None)
            The updates of a step with the keys that each of them uses, as for ShardedUpdate.apply().

        Returns
        -------
        dict
            Empty if the order makes no difference.
        """
        optimizer = self.optimizer
        if optimizer.lr_scheduler is None:
            return {}
        counts = optimizer._index_update_count
        dtypes = {key: one.dtype for one, used in updates for key in one.keys(used)}
        if len({counts.get(key) for key in dtypes}) < 2:
            return {}
        kinds: dict[Any, list[Hashable]] = {}
        for key in sorted(dtypes):
            kinds.setdefault(dtypes[key], []).append(key)
        reached, largest = {}, optimizer.num_update
        step = counted_together(optimizer)
        for keys in kinds.values():
            for begin in range(0, len(keys), step):
                together = keys[begin : begin + step]
                largest = max(largest, *(counts.get(key, optimizer.begin_num_update) + 1 for key in together))
                reached.update(dict.fromkeys(together, largest))
        asked = {count: Reached(count, optimizer.lr_scheduler(count)) for count in dict.fromkeys(reached.values())}
        return {key: asked[count] for key, count in reached.items()}

    def replace(self, states: dict[Hashable, Any], optimizer: Any) -> None:
        """Continue with other states of this worker's shards, and with another optimizer unless `optimizer` is None."""
        self.updater.states = states
        self.updater.states_synced = dict.fromkeys(states, False)
        if optimizer is None:
            return
        optimizer.param_dict = self.optimizer.param_dict
        continue_counts(optimizer, self._device_ids)
        self.updater.optimizer = optimizer

    def __reduce__(self) -> tuple:
        raise TypeError(
            "Optimizer states that are divided over the workers cannot be pickled, nor can objects that refer to them: "
            "a trainer with update_on_kvstore=True and its parameters. Use net.save_parameters() and "
            "trainer.save_states()."
        )

    def __deepcopy__(self, memo: dict) -> StoreOptimizer:
        # copy.deepcopy(net) also copies the trainer, and so this object. Nothing is sent: one worker may copy alone.
        memo[id(self)] = made = StoreOptimizer.__new__(StoreOptimizer)
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made


class ShardedUpdate:
    """The update of some parameters of the same dtype, for every step.

    Parameters
    ----------
    store_optimizer : StoreOptimizer
    name : str
        The name by which its operations are matched; see `names`.
    members : sequence of Member
        The same on all workers. Their keys have owners, and their arrays stay the same from step to step.
    priority : int
        Operations with a higher priority run first.
    in_place : bool
        Whether an operation of the caller reduces each element to its owner, and overwrites the gradient. Otherwise
        reduce() does it, and leaves the gradients unchanged.

    Attributes
    ----------
    division : list of (int, int, int, int)
        Number of the member, begin, count and owner of each shard.
    weights : list of int
        Handles of the updated arrays, for operations that must run before the update.
    """

    def __init__(
        self,
        store_optimizer: StoreOptimizer,
        name: str,
        members: Sequence[Member],
        priority: int,
        in_place: bool = False,
    ) -> None:
        self._store_optimizer = store_optimizer
        self._process_set = store_optimizer.process_set
        self._updater = store_optimizer.updater
        self._name = name
        self._priority = priority
        # Not the members themselves: their gradients, which may be temporary, would live as long as this object.
        self._weights = [member.weights for member in members]
        self._in_place = [member.gradient for member in members] if in_place else []
        self._reduced: Sequence[NDArray] | None = None  # between reduce() and apply(): the gradients
        self._begun: list[Any] = []  # not empty once the operation of reduce() has been started
        self._ended: list[Any] = []  # not empty once the operation of apply() has been started or refused
        self.division: list[tuple[int, int, int, int]] = []
        self._own: list[tuple[Hashable, NDArray, NDArray]] = []  # key, gradient and weight of this worker's shards
        self._others: list[Hashable] = []
        self._order = [member.key for member in members]
        for number, member in enumerate(members):
            shards = store_optimizer.shards_of(member.key)
            self.division += [(number, shard.begin, shard.count, shard.owner) for shard in shards]
            own = store_optimizer.own_shard(member.key)
            if own is None:
                self._others.append(member.key)
                continue
            weight = arrays.elements(member.weights[0], own.begin, own.count)
            gradient = (
                arrays.elements(member.gradient, own.begin, own.count)
                if in_place
                else arrays.empty(weight.shape, member.gradient)
            )
            self._own.append((member.key, gradient, weight))
        self._homes = [member.weights[0] for member in members]
        self._copies = [(member.weights[0], copy) for member in members for copy in member.weights[1:]]
        self.weights = arrays.handles(self._homes)
        self._gradients = arrays.handles([gradient for _, gradient, _ in self._own])

    @staticmethod
    def names(name: str) -> tuple[str, str]:
        """The names of the operations of an update with this name."""
        return name, f"{name}/weights"

    @staticmethod
    def refuse(core: Any, name: str, reason: str) -> None:
        """Refuse an update with this name: it fails on the other workers, with the reason."""
        core.refuse(name, reason)
        core.refuse(ShardedUpdate.names(name)[1], reason, turn_of=name)

    def is_of(self, members: Sequence[Member]) -> bool:
        """Whether this update was created for these members' weights, in the same arrays."""
        return len(members) == len(self._weights) and all(
            len(new.weights) == len(old) and all(map(operator.is_, new.weights, old))
            for new, old in zip(members, self._weights)
        )

    def reduce(self, gradients: Sequence[NDArray], scale: float = 1.0, wire: str = "", label: str = "") -> None:
        """Reduce each element of the members' gradients, scaled, to its owner. Returns at once.

        `label` must be equal on all workers; by default it is the label of the optimizer.

        Raises
        ------
        RuntimeError, ValueError
            The core rejects the arrays, and nothing was pushed.
        """
        push = functools.partial(
            self._process_set._core.push_reduce_to_owners,
            self._name,
            arrays.handles(gradients),
            self.division,
            self._gradients,
            self.weights,
            scale=scale,
            priority=self._priority,
            label=label or self._store_optimizer.label(),
            wire=wire,
        )
        self.begin(push)
        self._reduced = gradients

    def begin(self, push: Callable[[], Any]) -> None:
        """Start the reduction to the owners by a call of `push`, which reduce() or (with `in_place`) the user gives."""
        if self.is_begun():  # Ctrl-C came before apply(), and other workers wait for this worker's weights
            self.refuse_weights("the update was interrupted on that rank")
        self._begun, self._ended = [], []
        try:
            operation.start(self._begun, push)
        except MXNetError:  # MXNet's NaiveEngine has already run the operation
            self._begun.append(None)
            raise

    def is_begun(self) -> bool:
        """Whether the other workers wait for apply(), or for a refusal of the weights."""
        return bool(self._begun) and not self._ended

    def own_gradients(self, used: Collection[Hashable] | None = None) -> list[NDArray]:
        """The gradients of this worker's shards between reduce() and apply(); `used` as for apply()."""
        return [gradient for key, gradient, _ in self._own if used is None or key in used]

    @property
    def dtype(self) -> Any:
        """The dtype of the parameters."""
        return self._homes[0].dtype

    def keys(self, used: Collection[Hashable] | None = None) -> list[Hashable]:
        """The keys of the members that are updated; `used` as for apply()."""
        return [key for key in self._order if used is None or key in used]

    def apply(
        self, used: Collection[Hashable] | None = None, reached: Mapping[Hashable, Reached] | None = None
    ) -> None:
        """Update this worker's shards, and send all weights to all workers. Returns at once.

        If the optimizer raises an error here, the other workers get it as an MXNetError in the weights.

        Parameters
        ----------
        used : collection of keys, optional
            Keys of the members that are updated, the same on all workers; all by default.
        reached : mapping, optional
            From StoreOptimizer.counts_reached().
        """
        try:
            self._run_updater(used, reached or {})
            if self._process_set.size() > 1:
                self._gather_weights()
            else:
                self._ended.append(None)
        except BaseException as error:  # including Ctrl-C, after which this worker may continue
            if not self._ended:
                self.refuse_weights(f"the update has failed on that rank: {type(error).__name__}: {error}")
            raise
        self._reduced = None
        for weight, copy in self._copies:
            arrays.copy(weight, copy)

    def _gather_weights(self) -> None:
        """Send all weights to all workers."""
        # `fenced` makes reads of the gradients wait for the updates. Reading a failed array clears the error for all
        # arrays that share the error, and a later update would then use a gradient that was not summed.
        gradients = self._reduced or self._in_place  # this reference keeps temporary arrays alive until the call
        push = functools.partial(
            self._process_set._core.push_gather_from_owners,
            self.names(self._name)[1],
            self.weights,
            self.division,
            self._priority,
            turn_of=self._name,
            fenced=arrays.handles(gradients),
        )
        try:
            operation.start(self._ended, push)
        except MXNetError:  # MXNet's NaiveEngine has already run the operation, and the other ranks get the error
            self._ended.append(None)
            raise

    def drop(self) -> None:
        """Skip the update after reduce(). All workers must do so."""
        self._reduced, self._begun = None, []

    def refuse_weights(self, reason: str) -> None:
        """Refuse the gathering of the weights: it fails on the other workers, with the reason."""
        self._reduced = None
        self._ended.append(None)
        self._process_set._core.refuse(self.names(self._name)[1], reason, turn_of=self._name)

    def _run_updater(self, used: Collection[Hashable] | None, reached: Mapping[Hashable, Reached]) -> None:
        optimizer = self._store_optimizer.optimizer
        own = [one for one in self._own if used is None or one[0] in used]
        for asked, several in itertools.groupby(own, lambda one: reached.get(one[0])):
            keys, gradients, weights = zip(*several)
            with arrays.not_recorded(), _rate_of(optimizer, asked):
                self._updater(list(keys), list(gradients), list(weights))
        others = [key for key in self._others if used is None or key in used]
        self._store_optimizer.count_updates(others, self._homes[0])
        if reached:
            optimizer.num_update = max(optimizer.num_update, *(one.count for one in reached.values()))


@contextlib.contextmanager
def _rate_of(optimizer: Any, asked: Reached | None) -> Iterator[None]:
    """Context manager in which the optimizer uses the learning rate of `asked`; None: the rate of its schedule."""
    if asked is None:
        yield
        return
    schedule = optimizer.lr_scheduler
    optimizer.num_update, optimizer.lr_scheduler = asked.count, _Asked(schedule, asked.rate)
    try:
        yield
    finally:
        optimizer.lr_scheduler = schedule


def _size_of(weight: NDArray) -> Size:
    rows = weight.shape[0] if weight.shape else 1
    return Size(weight.size, arrays.item_size(weight), max(weight.size // max(rows, 1), 1))
