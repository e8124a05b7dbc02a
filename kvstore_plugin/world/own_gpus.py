"""Assigns the GPUs of a host to its ranks."""

from __future__ import annotations

import logging

from . import process

_log = logging.getLogger("kvstore_plugin")
_reported: set[int] = set()  # starts of the core (process.generation) for which shared GPUs were logged


def own_gpus() -> list[int]:
    """Numbers of the GPUs that this rank should use, so that the ranks of a host divide them. Empty without GPUs.

    Ranks that see the same GPUs get equal numbers of them, in the order of their local ranks. If there are fewer GPUs
    than ranks, several ranks use the same GPU, which is logged once.

    Raises
    ------
    RuntimeError
        kvstore_plugin is not initialized.
    """
    gpus = process.core.gpus()
    ranks = next(ranks for ranks in process.core.host_ranks() if process.rank() in ranks)
    seen = gpus[process.rank()]
    sharing = [rank for rank in ranks if gpus[rank] == seen]
    position, each = sharing.index(process.rank()), len(seen) // len(sharing)
    if not seen:
        return []
    if each > 0:
        return list(range(position * each, (position + 1) * each))
    if position == 0 and process.generation not in _reported:
        _reported.add(process.generation)
        _log.warning(
            "%d ranks share %s on the host of rank %d. Start at most one rank for each GPU.",
            len(sharing),
            "1 GPU" if len(seen) == 1 else f"{len(seen)} GPUs",
            process.rank(),
        )
    return [position % len(seen)]
