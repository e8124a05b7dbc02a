"""Detects that some workers have loaded parameters or states and others have not, or have loaded others.

Such workers would continue to train with different weights, and only a bad result would show it. So this file records
which values a worker has loaded, until all workers are known to be equal. In the next step of a trainer with such
parameters the worker starts an exchange, with a label, under the name of the step's first operation. If all workers
have loaded values, all of them start this exchange, and compare digests of their values. Otherwise the core matches the
exchange with the gradients of other workers, and all workers get an error that shows the label.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..compat import arrays, patches
from ..compat.argument_errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import MXNetError, NDArray, Parameter, gluon, trainer_of
from ..coordination import agreement
from ..world import process
from ..world.process_set import ProcessSet
from .aux_params import is_auxiliary
from .check_in_step import difference_between, digest, digests_of
from .naming import Named, described
from .trainer_state import updates_counted

_LABEL = (
    "a step after load_parameters(), load_states(), set_data(), a failed update or broadcast (if only some workers did "
    "that, call broadcast_states() on all afterwards)"
)

# MXNetErrors about the arguments of this worker.
_OWN = (ArgumentTypeError, ArgumentValueError, ArgumentIndexError)

# For each loaded parameter, a copy of the values that it had when all workers were last equal. None if states were
# loaded, or if the values are sparse.
_loaded: weakref.WeakKeyDictionary[Parameter, NDArray | None] = weakref.WeakKeyDictionary()

# Digests of the optimizer's states of loaded Parameters, if states were loaded.
_states: weakref.WeakKeyDictionary[Parameter, int] = weakref.WeakKeyDictionary()

# The count of array updates of a Parameter's trainer at the first failed update; a text unique to this worker if
# MXNet's engine has skipped updates on this worker alone, or if a broadcast of the Parameter's first values has failed.
_failed: weakref.WeakKeyDictionary[Parameter, int | str] = weakref.WeakKeyDictionary()

# For the first Parameter of each update: the numbers under which the core records failed updates (gradients/fence.py),
# and for each number the Parameters of the trainer. A Parameter may belong to several trainers.
_watched: weakref.WeakKeyDictionary[Parameter, dict[int, weakref.WeakSet]] = weakref.WeakKeyDictionary()

# For the last broadcasts of a Parameter's first values: their names, by the numbers under which the core records them
# if they fail.
_sent: weakref.WeakKeyDictionary[Parameter, dict[int, str]] = weakref.WeakKeyDictionary()

_count = itertools.count(1)

updating = threading.local()  # `trainer`: the trainer that updates in this thread, see gradients/step_guard.py


def any_of(parameters: Iterable[Parameter]) -> bool:
    """Whether this worker has loaded new values of a Parameter, or its trainer's states, since all were last equal.

    A failed update of a Parameter counts too, and a failed broadcast of its first values. Waits for the values of
    loaded Parameters.
    """
    failed = process.core.take_failed_updates()
    if failed:
        _note_failed(failed)
    if not _loaded:
        return False
    for parameter in [parameter for parameter in parameters if parameter in _loaded]:
        if _differs(parameter, _loaded[parameter]):
            return True
        forget([parameter])  # for example, other weights were loaded for an evaluation, then the old weights again
    return False


def label(parameters: Iterable[Parameter]) -> str:
    """The label that must be the same on all workers in a step for which `any_of` is true.

    Workers whose updates have failed at the same update have equal weights; after failures at different updates their
    weights differ.
    """
    counts = sorted({_failed[parameter] for parameter in parameters if parameter in _failed}, key=str)
    alone = [count for count in counts if isinstance(count, str)]
    if alone:
        return f"{_LABEL} ({alone[0]})"
    return f"{_LABEL} (it failed after {counts} updates of arrays)" if counts else _LABEL


def numbers_of(named: Sequence[Named]) -> list[int]:
    """Digests of values and loaded states, which must be the same on all workers. Waits for the values.

    Values of Parameters without gradients may differ between workers.

    Raises
    ------
    MXNetError
        An array carries an error.
    """
    trained = [item.value if item.value.grad_req != "null" else None for item in named]
    values = [0 if parameter is None else digests_of([parameter])[0] for parameter in trained]
    return values + [_states.get(item.value, 0) for item in named]


def check_numbers(named: Sequence[Named], met: np.ndarray, process_set: ProcessSet) -> None:
    """Raise an error if workers have loaded different values or states.

    Parameters
    ----------
    named : sequence of Named
    met : ndarray of int64, shape (size, 2 * len(named))
        Row r holds what `numbers_of` has returned on rank r of the process set.
    process_set : ProcessSet

    Raises
    ------
    RuntimeError
        They differ; all ranks of the process set get the error.
    """
    values, states = met[:, : len(named)], met[:, len(named) :]
    difference = difference_between(named, values, process_set)
    if difference is None:
        differ = np.flatnonzero((states != states[0]).any(axis=0))
        if not differ.size:
            return
        first = named[differ[0]]
        difference = f"{described(first.name, first.value)} has other states of the optimizer on some ranks."
    raise RuntimeError(
        f"{difference} All ranks have loaded values, or an update has failed on all of them. Load the same files on "
        "all workers, or call broadcast_states() on all."
    )


def _differs(parameter: Parameter, before: NDArray | None) -> bool:
    if before is None or parameter._data is None:
        return True
    try:
        return not np.array_equal(arrays.memory_of_weight(parameter._data[0]), arrays.memory(before))
    except MXNetError:
        return True


def note(parameters: Iterable[Parameter]) -> None:
    """Record that values of these Parameters, or states of their trainer, may differ from those of other workers."""
    _loaded.update(dict.fromkeys(parameters))


def note_changes(parameters: Iterable[Parameter]) -> None:
    """Record the values of these Parameters of a trainer, which this worker is about to change, or may change.

    Returns at once: other workers may still have to send the values.
    """
    for parameter in parameters:
        # Without earlier values this is an initialization, which a DistributedTrainer's broadcast may follow. Auxiliary
        # values (of BatchNorm) are not the same on all workers anyway.
        if parameter._data is None or parameter in _loaded or is_auxiliary(parameter):
            continue
        value = parameter._data[0]
        with arrays.not_recorded():
            _loaded[parameter] = value.copy() if value.stype == "default" else None


def note_states(trainer: gluon.Trainer) -> None:
    """Record that this worker has loaded the states of a trainer. Waits for the states."""
    note(trainer._params)
    states = trainer._updaters[0].states
    for number, parameter in enumerate(trainer._params):
        _states[parameter] = agreement.digest(_texts_of(states.get(number)))


def _texts_of(state: Any) -> list[str]:
    if isinstance(state, NDArray):
        return [str(digest(state if state.stype == "default" else state.tostype("default")))]
    if isinstance(state, (list, tuple)):
        return [text for part in state for text in _texts_of(part)]
    return [] if state is None else [type(state).__name__]  # values of another kind are not compared


def watched(parameters: Sequence[Parameter]) -> int:
    """The number by which the core records a failed update of Parameters by the current trainer."""
    trainer = getattr(updating, "trainer", None)
    of_trainer = weakref.WeakSet(parameters if trainer is None else trainer._params)
    known = _watched.setdefault(parameters[0], {})
    number = next((number for number, members in known.items() if members == of_trainer), None)
    if number is None:
        number = next(_count)
        known[number] = of_trainer
    return number


def watched_broadcasts(parameter: Parameter, names: Sequence[str]) -> list[int]:
    """The numbers by which the core records failed broadcasts of a Parameter's first values.

    `names`: the names of the broadcasts. If one fails, a script that catches the error would go on with other values on
    each worker. Earlier broadcasts of this Parameter no longer count.
    """
    keys = [next(_count) for _ in names]
    if not is_auxiliary(parameter):
        _sent[parameter] = dict(zip(keys, names))
    return keys


def _note_failed(failed: Iterable[int]) -> None:
    """Record broadcasts that have failed, and updates that MXNet's engine has skipped or aborted on this worker,
    although their sums succeeded."""
    keys = set(failed)
    for parameter, names in list(_sent.items()) if keys else ():
        for key in keys.intersection(names) if parameter._data is not None else ():
            note([parameter])
            _failed.setdefault(parameter, f"the broadcast {names[key]} has failed on rank {process.rank()}")
    for known in list(_watched.values()) if keys else ():
        for number in keys.intersection(known):
            note(known[number])
            text = f"an operation of MXNet in an update has failed on rank {process.rank()} alone"
            _failed.update((one, _failed.get(one, text)) for one in known[number])


def note_failure(parameters: Sequence[Parameter], trainer: Any = None) -> None:
    """Record that an update of Parameters has failed on this worker, but perhaps not on other workers.

    `trainer`: the updating trainer; by default the trainer that updates in this thread.
    """
    note(parameters)
    trainer = trainer or getattr(updating, "trainer", None) or (trainer_of(parameters[0]) if parameters else None)
    if trainer is not None:
        count = updates_counted(trainer)
        for parameter in parameters:
            _failed.setdefault(parameter, count)


def note_error(error: BaseException, trainer: gluon.Trainer) -> None:
    """Record a failed update of a trainer, if its error may be this worker's alone.

    An MXNetError that is not about this worker's own arguments may come from another worker. Then all workers that wait
    in the update get it.
    """
    if not isinstance(error, MXNetError) or isinstance(error, _OWN):
        note_failure(trainer._params, trainer)


def forget(parameters: Iterable[Parameter]) -> None:
    """Record that all workers have the same values of these Parameters."""
    _note_failed(process.core.take_failed_updates())
    if _loaded or _failed or _states:
        for parameter in list(parameters):
            for known in (_loaded, _failed, _states):
                known.pop(parameter, None)


@patches.replaces(
    "gluon.Parameter._load_init",
    when=patches.AT_INIT,
    why="Where only some workers load parameters, weights would drift apart.",
    does="Notes that a trainer's Parameter has other values, for an error in the next step.",
    undone_by="a Parameter without a trainer",
)
def _load_init(original: Callable, self: Parameter, *args: Any, **kwargs: Any) -> None:
    note_changes([self] if trainer_of(self) is not None else ())
    original(self, *args, **kwargs)
