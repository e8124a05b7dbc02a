"""Handles the name 'mykv' in MXNet's arguments for stores."""

from __future__ import annotations

import os
from typing import Any, Callable

from mykvrun import auto_register

from ..compat import patches
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import KVStoreBase, mx
from ..world import launch_checks
from .kvstore import MyKV

_NAME = "mykv"


def is_ours(store: Any) -> bool:
    """Whether the argument `kvstore` of MXNet's trainers is a store of this package, or its name."""
    return isinstance(store, MyKV) or (isinstance(store, str) and store.lower() == _NAME)


def created(store: Any) -> Any:
    """The argument `kvstore` of MXNet's trainers, with the name 'mykv' replaced by the store."""
    check_spelling(store)
    return mx.kv.create(_NAME) if isinstance(store, str) and is_ours(store) else store


def check_spelling(store: Any) -> None:
    """Raise a ValueError for an unknown store name that can only mean 'mykv'."""
    if not isinstance(store, str) or store.lower() in KVStoreBase.kv_registry:
        return
    if store.lower().startswith("dist") and _is_without_servers():
        raise ArgumentValueError(
            f"MXNet's store {store!r} needs a scheduler and servers, which MXNet's tools/launch.py starts; mykvrun and "
            "mpirun start none. Use kvstore='mykv', which trains synchronously without servers."
        )
    if auto_register.can_only_mean_mykv(store.lower()):
        raise ArgumentValueError(
            f"There is no store {store!r}, and MXNet would make a store with which each worker trains alone. "
            "Is 'mykv' meant?"
        )


def _is_without_servers() -> bool:
    launched = launch_checks.launched_processes(os.environ)
    return launched is not None and launched[1] > 1 and "DMLC_ROLE" not in os.environ


@patches.replaces(
    "kvstore.create",
    why="MXNet takes an unknown name for a store of one process, silently: each worker would train alone.",
    does="Raises an error for a name that can only mean 'mykv', such as 'mykw', 'kvstore_plugin' or 'horovod'.",
    undone_by="another name",
)
def _create(original: Callable, name: Any = "local", *args: Any, **kwargs: Any) -> Any:
    check_spelling(name)
    return original(name, *args, **kwargs)
