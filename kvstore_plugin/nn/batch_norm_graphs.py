"""SyncBatchNorm layers in the graphs of hybridized networks, whose calls must run in the program's order.

MXNet's engine takes the operators of a graph with static_shape for mere readers of the running statistics. So the
engine would run two calls of the graph in the order in which their inputs are ready, which is not the same on all
workers, and the workers would sum different calls.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Sequence

from ..compat import patches
from ..compat.mxnet import NDArray, autograd
from . import batch_norm_calls

ONLY_EVALUATES = (
    "A network from a file or a SymbolBlock has its own parameters for a SyncBatchNorm, so it can evaluate but not "
    "train. To train, build the network from its layers and load their parameters."
)
_OCCURS_TWICE = (
    "A SyncBatchNorm occurs twice in a graph with static_shape=True, where MXNet may run it in any order. Hybridize "
    "with static_alloc=True alone."
)


class _Use(NamedTuple):
    """A SyncBatchNorm in a graph."""

    calls: batch_norm_calls.Calls | None  # None if this process has imported the graph
    means: int  # the number of the input with the running means

    def is_own(self, inputs: Sequence[NDArray]) -> bool:
        """Whether the input is the layer's own array."""
        if self.calls is None:
            return False
        return any(inputs[self.means] is one for one in self.calls.parameters["running_mean"]._data or ())


_exist = False


def note_layer() -> None:
    """Register that this process has a layer, or a graph with one."""
    global _exist
    _exist = True


def _uses(symbol: Any) -> list[_Use]:
    """The layers in a graph whose statistics change in training."""
    names, nodes, uses = symbol.list_inputs(), json.loads(symbol.tojson())["nodes"], []
    for node in nodes:
        texts = node.get("attrs", {})
        if texts.get("op_type") == "mykv_sync_batch_norm" and texts["use_global_stats"] == "False":
            means = nodes[node["inputs"][3][0]]["name"]
            uses.append(_Use(batch_norm_calls.of_key.get(texts["scope"]), names.index(means)))
    return uses


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
        __slots__ = ("_has_static_shape", "_uses")

        def __init__(self, sym: Any, flags: Any = (), *args: Any, **kwargs: Any) -> None:
            self._uses = _uses(sym) if _exist else []
            self._has_static_shape = str(dict(flags).get("static_shape")) == "True"
            super().__init__(sym, flags, *args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self._uses:
                return super().__call__(*args, **kwargs)
            own = [use for use in self._uses if use.is_own(args)]
            if autograd.is_training():
                if len(own) < len(self._uses):
                    raise ValueError(ONLY_EVALUATES)
                if self._has_static_shape and len({use.means for use in own}) < len(own):
                    raise ValueError(_OCCURS_TWICE)
            for use in own:
                use.calls.follow(args[use.means])
            with batch_norm_calls.raising_interruption():
                result = super().__call__(*args, **kwargs)
            for use in own if self._has_static_shape else ():
                use.calls.separate()
            return result

    return CachedOp
