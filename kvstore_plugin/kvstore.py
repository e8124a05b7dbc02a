"""The store 'mykv': MXNet's KVStore interface over the compiled core.

Ranks are matched by key. What one rank can see to be wrong alone is refused there, and told to the others under the
same key, so that they get an error and do not wait.
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple

from . import arrays, parameters, process
from . import process_set as process_sets
from .mxnet_compat import KVStoreBase, MXNetError, NDArray, create_stores_by_name
from .process_set import ProcessSet, global_process_set

# Priorities travel as 32 bits.
_LARGEST_PRIORITY = 2**31 - 1

# One call for one key: the name that all ranks use for it, what goes in and what comes out.
_Call = Tuple[str, Sequence[NDArray], Sequence[NDArray]]


@KVStoreBase.register
class MyKV(KVStoreBase):
    """Store for synchronous data-parallel training, made with ``mx.kv.create('mykv')`` or ``MyKV(process_set=...)``.

    Creating the first one initializes MPI and joins the other ranks, if kvstore_plugin.init() was not called before.
    Each store has keys of its own; all ranks must create their stores in the same order. 3 and '3' are different keys.
    In a process that no mpirun started it is rank 0 of 1.

    Calls return at once, and MXNet's engine orders their results: whatever reads or writes an array waits for them as
    for any operator. An error that another rank caused is raised as MXNetError where the array is read.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The ranks that take part, all of them by default. Where the store counts ranks, it does so within the set.

    Raises
    ------
    TypeError, ValueError
        It is no ProcessSet, is not added, or this process is not in it.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        process.require()
        process_sets.check(process_set)
        self._process_set = process_set
        self._scope = parameters.numbered(process_set, "kv")

    def __repr__(self) -> str:
        return f"<MyKV {self._scope}>"

    @property
    def type(self) -> str:
        """Name of this kind of store: 'mykv'."""
        return "mykv"

    @property
    def rank(self) -> int:
        """Number of this worker among those of the store, from 0."""
        return self._process_set.rank()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._process_set.size()

    @property
    def size(self) -> int:
        """Number of workers, as `num_workers`."""
        return self._process_set.size()

    @property
    def local_rank(self) -> int:
        """Number of this worker among those of its host, from 0."""
        return self._process_set.core.local_rank()

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self._process_set.core.local_size()

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy the bits of rank 0's `value` into `out` on every rank.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by.
        value : NDArray, or list of NDArray for a list of keys
            Any shape; the dtypes that the release has. On ranks other than 0 only its shape and dtype count, and it is
            nowhere changed unless it is in `out` itself.
        out : NDArray or list of NDArray (several devices), or a list of these for a list of keys; optional
            Where the result goes; into `value` by default.
        priority : int, optional
            Operations with a higher one run first.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone: wrong types, other shapes or dtypes in `out` than in `value`, lists of other
            lengths. The other ranks then get an MXNetError in `out` that says so.
        """
        calls = self._calls("broadcast", key, value, out, priority)
        for number, (name, inputs, outputs) in enumerate(calls):
            try:
                self._process_set.core.push_broadcast(
                    name, inputs[0].handle.value, arrays.handles(outputs), 0, priority
                )
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError) as error:
                raise self._refused(calls[number:], error) from error

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum `value` over all workers and over all devices of a list.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by.
        value : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            Any shape; the dtypes that the release has. float16 and bfloat16 are summed in float32. Not changed unless
            it is in `out` itself.
        out : like `value`, optional
            Where the sum goes, on every rank; into `value` by default.
        priority : int, optional
            Operations with a higher one run first.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone, as for `broadcast`.
        """
        calls = self._calls("pushpull", key, value, out, priority)
        for number, (name, inputs, outputs) in enumerate(calls):
            source = arrays.handles(inputs)
            target = source if outputs is inputs else arrays.handles(outputs)
            try:
                self._process_set.core.push_allreduce(name, source, target, "sum", 1.0, priority)
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError) as error:
                raise self._refused(calls[number:], error) from error

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do `capability`; False for 'optimizer' and for names that it does not know."""
        return False

    def set_optimizer(self, optimizer: Any) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError(
            "MyKV keeps no weights, so it cannot run an optimizer: use update_on_kvstore=False in gluon.Trainer(...)."
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError("MyKV has no optimizer whose states it could save: use Trainer.save_states.")

    def load_optimizer_states(self, fname: str) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError("MyKV has no optimizer whose states it could load: use Trainer.load_states.")

    def set_gradient_compression(self, compression_params: dict) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError("MyKV does not compress gradients yet: leave out compression_params.")

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError("MyKV keeps no values between calls: use pushpull.")

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Not built: raises NotImplementedError."""
        raise NotImplementedError("MyKV keeps no values between calls: use pushpull or broadcast.")

    def init(self, key: Any, value: Any) -> None:
        """Not built: raises NotImplementedError. The Module API asks for it, which keeps weights in the store."""
        raise NotImplementedError("MyKV keeps no values between calls: use broadcast (and Gluon instead of Module).")

    def __reduce__(self) -> tuple:
        # A copy is the same store: nothing but the name of its keys makes one.
        return _store_named, (self._scope, self._process_set)

    def _calls(self, method: str, key: Any, value: Any, out: Any, priority: int) -> list[_Call]:
        """Check a whole call before any of it runs; if something is wrong, refuse all of it on the other ranks too."""
        try:
            if type(priority) is not int or not -_LARGEST_PRIORITY <= priority <= _LARGEST_PRIORITY:
                _refuse_priority(priority)
            if type(key) is int or type(key) is str:
                return [self._call(method, key, value, out)]
            return self._several_calls(method, key, value, out)
        except (TypeError, ValueError) as error:
            for name in self._names(key):
                self._process_set.core.refuse(name, str(error))
            raise

    def _call(self, method: str, key: int | str, value: Any, out: Any) -> _Call:
        inputs = arrays.as_list(value, f"value of key {key!r}")
        if method == "broadcast" and len(inputs) > 1:
            raise ValueError(f"The value of key {key!r} must be one NDArray, but it is a list of {len(inputs)}.")
        if out is None:
            outputs = inputs
            if len(inputs) > 1:
                arrays.check_alike(inputs, f"arrays in the value of key {key!r}")
        else:
            outputs = arrays.as_list(out, f"out of key {key!r}")
            arrays.check_alike([*inputs, *outputs], f"value and out of key {key!r}")
        return f"{self._scope}/{key!r}", inputs, outputs

    def _several_calls(self, method: str, key: Any, value: Any, out: Any) -> list[_Call]:
        if isinstance(key, (int, str)):  # True, an IntEnum and the like
            return [self._call(method, _plain(key), value, out)]
        if not isinstance(key, (list, tuple)):
            raise TypeError(f"A key must be an int, a str or a list of them, not {type(key).__name__}.")
        for one in key:
            if not isinstance(one, (int, str)):
                raise TypeError(f"A list of keys must hold ints or strs, not {type(one).__name__}.")
        outs = [None] * len(key) if out is None else out
        for what, given in (("values", value), ("outs", outs)):
            if not isinstance(given, (list, tuple)):
                raise TypeError(f"A list of keys needs a list of {what}, not {type(given).__name__}.")
            if len(given) != len(key):
                raise ValueError(f"There are {len(key)} keys but {len(given)} {what}.")
        calls = [self._call(method, _plain(k), v, o) for k, v, o in zip(key, value, outs)]
        return calls if len({call[0] for call in calls}) == len(calls) else _grouped(method, calls)

    def _refused(self, calls: list[_Call], error: Exception) -> ValueError:
        """Refuse what is left of a call whose first array the core does not take (a dtype); returns what to raise.

        Where there is no core, this raises the RuntimeError that says so.
        """
        reason = f"Key {_shown(calls[0][0])}: {error}."
        for name, _, _ in calls:
            self._process_set.core.refuse(name, reason)
        return ValueError(reason)

    def _names(self, key: Any) -> list[str]:
        """Names of the keys in `key`, each once; those that are no keys have none."""
        keys = key if isinstance(key, (list, tuple)) else [key]
        return list(dict.fromkeys(f"{self._scope}/{_plain(k)!r}" for k in keys if isinstance(k, (int, str))))


def _shown(name: str) -> str:
    return name.partition("/")[2]


def _plain(key: int | str) -> int | str:
    """The key as a plain int or str, so that ranks that use subclasses of these agree with ranks that do not."""
    return int(key) if isinstance(key, int) else str(key)


def _refuse_priority(priority: Any) -> None:
    if not isinstance(priority, int):
        raise TypeError(f"The priority must be an int, not {type(priority).__name__}.")
    if not -_LARGEST_PRIORITY <= priority <= _LARGEST_PRIORITY:
        raise ValueError(f"The priority must be between -{_LARGEST_PRIORITY} and {_LARGEST_PRIORITY}, not {priority}.")


def _grouped(method: str, calls: list[_Call]) -> list[_Call]:
    """Calls in which a key occurs more than once: its values are devices of one value, as in MXNet's own stores."""
    if method == "broadcast":
        raise ValueError("A list of keys for broadcast must not hold a key twice.")
    groups: dict[str, tuple[list, list]] = {}
    for name, inputs, outputs in calls:
        group = groups.setdefault(name, ([], []))
        group[0].extend(inputs)
        group[1].extend(outputs)
    for name, (inputs, outputs) in groups.items():
        arrays.check_alike(inputs + outputs, f"values of key {_shown(name)}")
    return [(name, inputs, outputs) for name, (inputs, outputs) in groups.items()]


def _store_named(scope: str, process_set: ProcessSet) -> MyKV:
    store = MyKV.__new__(MyKV)
    store._scope, store._process_set = scope, process_set
    return store


create_stores_by_name("mykv")
