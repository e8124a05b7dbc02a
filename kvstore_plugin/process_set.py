"""Which ranks take part in an operation; today always all of them."""

from __future__ import annotations


class ProcessSet:
    """A group of ranks. Only `global_process_set`, the one of all ranks, is built yet."""

    def __init__(self, *ranks: int) -> None:
        raise NotImplementedError("Process sets other than global_process_set are not built yet.")

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"  # copies and pickles are this one object


global_process_set = object.__new__(ProcessSet)


def check(process_set: object) -> None:
    """Raise what is wrong with a value of the argument `process_set`.

    Raises
    ------
    NotImplementedError
        It is something else than `global_process_set`.
    """
    if process_set is not global_process_set:
        raise NotImplementedError(f"process_set must be global_process_set, others are not built yet: {process_set!r}.")
