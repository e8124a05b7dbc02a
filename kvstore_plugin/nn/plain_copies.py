"""The copies before and after a Python operator; sync_batch_norm.py explains why they are needed."""

from __future__ import annotations

from typing import Any


def plain(F: Any, data: Any) -> Any:
    """A copy in the default layout; its gradient is in the default layout too.

    SwapAxis of an axis with itself is a plain copy, forward and backward, and the fastest operator found. It has no
    implementation for oneDNN's layouts, and its output never shares the memory of its input. An operator whose output
    may share this memory, such as a multiplication by 1, keeps the blocked layout in a hybridized network.
    """
    return F.SwapAxis(data, dim1=0, dim2=0)
