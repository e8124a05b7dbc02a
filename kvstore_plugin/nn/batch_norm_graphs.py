"""SyncBatchNorm layers in the graphs of hybridized networks, whose calls must run in the program's order.

MXNet's engine takes the operators of a graph with static_shape for mere readers of the running statistics. So the
engine would run two calls of the graph in the order in which their inputs are ready, which is not the same on all
workers, and the workers would sum different calls.
"""

from __future__ import annotations

from typing import Any

from ..compat import patches
from ..compat.mxnet import autograd
from . import batch_norm_calls

ONLY_EVALUATES = (
    "A network from a file or a SymbolBlock has its own parameters for a SyncBatchNorm, so it can evaluate but not "
    "train. To train, build the network from its layers and load their parameters."
)
_OCCURS_TWICE = (
    "A SyncBatchNorm occurs twice in a graph with static_shape=True, where MXNet may run it in any order. Hybridize "
    "with static_alloc=True alone."
)


_exist = False


def note_layer() -> None:
    """Register that this process has a layer, or a graph with one."""
    global _exist
    _exist = True


def _layers(symbol: Any) -> list[batch_norm_calls.Calls | None]:
    """The layers in a graph whose statistics change in training; None for those of a graph that was imported.

    Not from tojson(): in MXNet 1.9.1 it leaks the properties of custom operators, and with them the layers.
    """
    nodes = [node.list_attr() for node in symbol.get_internals()]  # not attr_dict(): uses of a layer have equal names
    return [
        batch_norm_calls.of_key.get(texts["scope"])
        for texts in nodes
        if texts.get("op_type") == "mykv_sync_batch_norm" and texts["use_global_stats"] == "False"
    ]


# Not HybridBlock._call_cached_op: a class with MXNet's decorator use_np has its own copies of inherited methods.
@patches.replaces(
    "ndarray.CachedOp",
    when=patches.AT_INIT,
    why="In graphs with static_shape=True, or after `initialize(force_reinit=True)`, MXNet may run calls of a "
    "`SyncBatchNorm` in another order than the program's, and the workers would sum different calls.",
    does="Lets them run in the program's order. Raises an error for layers that cannot train.",
    undone_by="a network without `SyncBatchNorm`",
    makes=True,
)
def _cached_op(original: Any) -> Any:
    class CachedOp(original):
        __slots__ = ("_has_static_shape", "_layers")

        def __init__(self, sym: Any, flags: Any = (), *args: Any, **kwargs: Any) -> None:
            self._layers = _layers(sym) if _exist else []
            self._has_static_shape = str(dict(flags).get("static_shape")) == "True"
            super().__init__(sym, flags, *args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self._layers:
                return super().__call__(*args, **kwargs)
            given = set(map(id, args))
            own = [calls for calls in self._layers if calls is not None and id(calls.means()) in given]
            if autograd.is_training():
                if len(own) < len(self._layers):
                    raise ValueError(ONLY_EVALUATES)
                if self._has_static_shape and len(set(own)) < len(own):
                    raise ValueError(_OCCURS_TWICE)
            for calls in own:
                calls.follow()
            with batch_norm_calls.raising_interruption():
                result = super().__call__(*args, **kwargs)
            for calls in own if self._has_static_shape else ():
                calls.separate()
            return result

    return CachedOp
