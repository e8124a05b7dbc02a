"""Process sets: all ranks, or a part of them, among which operations run.

Each set has its own runtime in the core, with its own thread and shared memory, so that sets do not wait for each
other. coordination/process_sets.py adds and removes sets.
"""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any, Mapping, NamedTuple, Sequence

from . import process

_added: dict[tuple[int, ...], ProcessSet] = {}


class ProcessSet:
    """A subset of the ranks, whose operations do not involve the other ranks.

    Create the set on all ranks, members and others, and pass it to `init` or `add_process_set` on all ranks; then pass
    it to operations on its members. Sets may overlap.

    Parameters
    ----------
    ranks_or_comm : sequence of int, or mpi4py.MPI.Intracomm
        Global ranks, in any order, or a communicator. Each member of a communicator passes that communicator or one
        with the same processes, as after ``comm.Split``; ``MPI.COMM_NULL`` means a set of other ranks.

    Attributes
    ----------
    process_set_id : int or None
        Number of the set, the same on all ranks; None while it is not added.
    ranks : list of int or None
        Global ranks of the members; the member of rank r in the set is ranks[r]. Ascending if the set was created from
        ranks, otherwise in the order of the communicator. None if it was created from a communicator and is not added.
    mpi_comm : mpi4py.MPI.Intracomm or None
        The communicator that the set was created from.

    Raises
    ------
    TypeError
        `ranks_or_comm` is something else.
    ValueError
        There are no ranks, a rank is negative, or a rank occurs twice.

    Examples
    --------
    >>> generators = mykv.ProcessSet([0])
    >>> generators = mykv.add_process_set(generators)  # on all ranks
    >>> generators.size(), generators.ranks
    (1, [0])
    >>> if generators.included():
    ...     trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", process_set=generators)
    ...     print(f"worker {generators.rank()} of the generators")
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._group: Any = None
        self._why_not = "was not added. Call add_process_set() with it on all ranks, members or not"
        self._numbers: dict[str, int] = {}
        self._bases: dict[str, int] = {}
        self._copies: dict[str, list[int]] = {}
        if _is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _checked_ranks(ranks_or_comm)

    def size(self) -> int | None:
        """Number of ranks in the set, or None while it is not added."""
        return len(self.ranks) if self._is_added() else None

    def rank(self) -> int | None:
        """Number of this process in the set, from 0, or None if it is not a member or the set is not added."""
        return self.ranks.index(process.rank()) if self.included() else None

    def included(self) -> bool | None:
        """Whether this process is a member, or None while the set is not added."""
        return process.rank() in self.ranks if self._is_added() else None

    @property
    def _core(self) -> Any:
        """The Group of the compiled core that runs the operations of the set.

        Raises
        ------
        ValueError
            This process is not a member, or the set is not added, or was removed.
        RuntimeError
            At its first use: kvstore_plugin is not initialized.
        """
        if not process.is_initialized():
            return process.core
        if self._group is not None:
            return self._group
        if not self._is_added():
            raise error_types.wrong_value(f"{self!r} {self._why_not}.")
        raise error_types.wrong_value(
            f"Rank {process.rank()} is not in {self!r}: only members may use it in operations."
        )

    @property
    def _scope(self) -> str:
        """The prefix of the names of the set's operations; the same on all members."""
        return f"set{self.process_set_id}"

    def _next_number(self, kind: str) -> int:
        """Number objects that the members create in the same order (stores, trainers): from 0, for each `kind`."""
        number = self._numbers.get(kind, 0)
        self._numbers[kind] = number + 1
        return number

    def _next_copy(self, kind: str) -> int:
        """Like `_next_number`, for a copy: members may make copies at different times."""
        number = self._next_number(kind)
        self._copies.setdefault(kind, []).append(number)
        return number

    def _copied(self, kind: str) -> list[int]:
        """The numbers of this member's copies from `_base` on."""
        return list(self._copies.get(kind, ()))

    def _counted(self) -> dict[str, int]:
        """Number of objects of each kind so far."""
        return dict(self._numbers)

    def _skip_to(self, numbers: Mapping[str, int]) -> None:
        """Continue from the larger of these numbers and the set's own: other members may have created more objects."""
        for kind, number in numbers.items():
            self._numbers[kind] = self._bases[kind] = max(number, self._numbers.get(kind, 0))
            self._copies.pop(kind, None)

    def _base(self, kind: str) -> int:
        """The number from which all members are known to count equally; see `_skip_to`."""
        return self._bases.get(kind, 0)

    def _position_of(self, root_rank: Any) -> int:
        """Rank within the set of a global rank.

        Raises
        ------
        TypeError, ValueError
            `root_rank` is not an int, or not in the set.
        """
        if not isinstance(root_rank, numbers.Integral):
            raise error_types.wrong_type(f"root_rank must be an int, not {type(root_rank).__name__}.")
        if root_rank not in self.ranks:
            raise error_types.wrong_value(f"root_rank must be a global rank in {self!r}, not {root_rank}.")
        return self.ranks.index(root_rank)

    def _is_added(self) -> bool:
        """Whether the set can be used: it was added, and not removed since."""
        return self.process_set_id is not None

    def _begin(self, number: int, ranks: tuple[int, ...], group: Any) -> None:
        """Mark this set as added; `group` runs its operations, None if this process is not a member."""
        self.process_set_id, self.ranks, self._group = number, list(ranks), group
        self._numbers, self._bases, self._copies = {}, {}, {}
        _added[ranks] = self

    def _end(self, why_not: str) -> Any:
        """Mark this set as not added, and return its group; later uses raise an error with `why_not`."""
        _added.pop(tuple(self.ranks), None)
        group, self._group = self._group, None
        self.process_set_id, self._why_not = None, why_not
        return group

    def __repr__(self) -> str:
        return f"ProcessSet({shown(self.ranks) if self.ranks is not None else 'of a communicator'})"

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __reduce__(self) -> tuple:
        # A copy of a set that is added is that set, in this and in other processes.
        if self.ranks is None:
            raise TypeError(
                "A ProcessSet of a communicator cannot be copied before it was added. Call add_process_set() with it "
                "first."
            )
        return _set_of, (tuple(self.ranks),)


class _AllRanks(ProcessSet):
    """The set of all ranks, which exists as long as kvstore_plugin is initialized."""

    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = None
        self._numbers, self._bases, self._copies = {}, {}, {}

    @property
    def ranks(self) -> list[int] | None:
        return list(range(process.size())) if process.is_initialized() else None

    def size(self) -> int:
        return process.size()

    def rank(self) -> int:
        return process.rank()

    def included(self) -> bool:
        return process.is_initialized()

    @property
    def _core(self) -> Any:
        return process.core

    @property
    def _scope(self) -> str:
        return "world"

    def _position_of(self, root_rank: Any) -> int:
        if not isinstance(root_rank, numbers.Integral):
            raise error_types.wrong_type(f"root_rank must be an int, not {type(root_rank).__name__}.")
        if not 0 <= root_rank < process.size():
            raise error_types.wrong_value(f"root_rank must be a rank, from 0 to {process.size() - 1}, not {root_rank}.")
        return int(root_rank)

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"  # copies and pickles are this object itself


global_process_set: ProcessSet = _AllRanks()
"""The set of all ranks, which exists from init() to shutdown().

Examples
--------
>>> mykv.global_process_set.size()
2
>>> loss = mykv.allreduce(mx.np.ones(1), process_set=mykv.global_process_set)
"""


def joined() -> list[ProcessSet]:
    """The sets that this process is a member of."""
    return [global_process_set, *(one for one in list(_added.values()) if one.included())]


class _EqualNumbers(process.Follower):
    """Aligns the numbers of objects on all ranks: before init(), some ranks may have created more objects."""

    def tell(self) -> dict[str, int]:
        return global_process_set._counted()

    def hear(self, told: Sequence[dict[str, int]]) -> None:
        for counted in told:
            global_process_set._skip_to(counted)


process.follow(_EqualNumbers())


class ErrorTypes(NamedTuple):
    """The exception classes for wrong arguments."""

    wrong_type: type[Exception]
    wrong_value: type[Exception]


error_types = ErrorTypes(TypeError, ValueError)  # compat/ replaces them with MXNetErrors


def check(process_set: Any) -> None:
    """Check the argument `process_set` of an operation.

    Raises
    ------
    TypeError, ValueError
        `process_set` is not a ProcessSet, is not added, or this process is not a member.
    """
    if not isinstance(process_set, ProcessSet):
        raise error_types.wrong_type(f"process_set must be a ProcessSet, not {type(process_set).__name__}.")
    process_set._core  # noqa: B018 - raises


def _is_communicator(value: Any) -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and isinstance(value, MPI.Comm)


def _checked_ranks(given: Any) -> list[int]:
    try:
        ranks = sorted(operator.index(rank) for rank in given)
    except TypeError:
        raise TypeError(
            f"A process set is made of a list of ranks or an mpi4py communicator, not of {given!r}."
        ) from None
    if not ranks:
        raise ValueError("A process set needs at least one rank.")
    if ranks[0] < 0:
        raise ValueError(f"A process set has the rank {ranks[0]}, but ranks count from 0.")
    for rank, following in zip(ranks, ranks[1:]):
        if rank == following:
            raise ValueError(f"A process set has the rank {rank} twice.")
    return ranks


def shown(ranks: Sequence[int]) -> str:
    """Ranks as text, shortened if there are many."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}, ... ({len(ranks)} ranks)]" if len(ranks) > 8 else f"[{shown}]"


def _set_of(ranks: tuple[int, ...]) -> ProcessSet:
    return _added.get(ranks) or ProcessSet(ranks)
