"""WorkersLost: the error of operations after a worker has died, if the other workers can continue (docs/elastic.md)."""

from __future__ import annotations

from typing import Any

from ..world import failure_detector
from .mxnet import MXNetError, mx


class WorkersLost(MXNetError):
    """A worker's process has ended, so operations fail on all other workers. `run_elastic` continues without it.

    Attributes
    ----------
    code : str
        ``'dead'``.
    ranks : tuple of int
        The ranks whose processes have ended, if they are known.

    Examples
    --------
    >>> try:  # in a job without elastic training: report the lost workers, and end
    ...     mykv.barrier()
    ... except mykv.WorkersLost as error:
    ...     print(f"{error.code}: lost the workers {error.ranks}")
    ...     raise
    """

    code = "dead"
    ranks: tuple[int, ...] = ()


# An array keeps only the text of its error. If the text begins with the name of a registered class, MXNet raises an
# error of this class. So the core puts the name before errors with the code "dead" (csrc/mxnet/bridge.cpp).
mx.base.register_error(WorkersLost)


def check() -> None:
    """Raise a WorkersLost if a worker was lost."""
    if failure_detector.death:
        raise WorkersLost(f"{failure_detector.death}.")


def reason_of(error: BaseException) -> str:
    """The text of an exception for the other workers; its type if it has no text, as Ctrl-C has none."""
    return str(error) or type(error).__name__


def any_failure(error: BaseException) -> Any:
    """A WorkersLost that replaces an error of the core or MXNet if a worker was lost; otherwise the error itself."""
    sentence = failure_detector.lost()
    if isinstance(error, WorkersLost) or not (sentence or code_of(error) == "dead"):
        return error
    lost = WorkersLost(f"{error} ({sentence})" if sentence else str(error))
    if code_of(error) == "dead":
        lost.ranks = error.ranks
    return lost


def of_core(error: RuntimeError, text: str = "") -> MXNetError:
    """The MXNetError, with `code` and `ranks`, for an error of the core; a WorkersLost if a worker was lost.

    `text` replaces the text of the error.
    """
    made = MXNetError(text or str(error))
    made.code, made.ranks = code_of(error), getattr(error, "ranks", ())
    return any_failure(made)


def code_of(error: BaseException) -> str:
    """The code of an error of the core (docs/errors.md); ``'other'`` if the error has no code."""
    return getattr(error, "code", "other")
