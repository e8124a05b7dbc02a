"""The copies between which an operator written in Python stands; the reason is in sync_batch_norm.py."""

from __future__ import annotations

from typing import Any


def plain(F: Any, data: Any) -> Any:
    """A copy in the usual layout; its gradient is in the usual layout too.

    SwapAxis of an axis with itself is a plain copy, forward and backward, and the fastest of the operators that were
    tried. It has no implementation for oneDNN's layouts, and its output never shares the memory of its input. If an
    operator's output may share it, as in a multiplication by 1, an array keeps its blocked layout in a hybridized
    network.
    """
    return F.SwapAxis(data, dim1=0, dim2=0)
