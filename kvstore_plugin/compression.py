"""In what form gradients travel between hosts: what the argument `compression` of a trainer says of it.

More ways, which keep what they lose, are named by a dictionary: see gradient_compression.py.
"""

from __future__ import annotations

from typing import Any

from .gradient_compression import GradientCompression, gradient_compression


class _Method:
    def __init__(self, name: str, wire: str) -> None:
        self.name = name
        self.wire = wire  # the core's name of the type; empty for the gradient's own

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def __reduce__(self) -> tuple:
        return getattr, (Compression, self.name)  # a copy is this very object


class Compression:
    """Choices for the argument `compression` of `DistributedTrainer`.

    They concern what travels between hosts, where the network is the limit: gradients of float32 and float64 travel in
    16 bits there, and those of other types as they are. Within a host, in shared memory, gradients are summed in their
    own type, which is faster than to convert them, and exact. So on one host all choices give the same bits.

    The argument `compression_params` names these too, and others that make messages shorter still.

    Attributes
    ----------
    none
        Gradients travel in their own dtype.
    fp16
        As float16, with 11 bits of precision and values up to 65504; larger ones become infinite.
    bf16
        As bfloat16, with 8 bits of precision and the range of float32.
    """

    none = _Method("none", "")
    fp16 = _Method("fp16", "float16")
    bf16 = _Method("bf16", "bfloat16")


def choose(compression: Any, compression_params: Any) -> _Method | GradientCompression:
    """What the arguments `compression` and `compression_params` of a trainer say together.

    The result has an attribute `wire`, the core's text for it.

    Raises
    ------
    TypeError, ValueError
        One of them is wrong, or both choose something.
    """
    if not isinstance(compression, _Method):
        raise TypeError(
            f"compression must be an attribute of Compression, such as Compression.fp16, not {compression!r}."
        )
    if compression_params is None or compression_params == {}:
        return compression
    if compression is not Compression.none:
        raise ValueError(
            f"Give either compression ({compression!r}) or compression_params ({compression_params!r}), not both."
        )
    chosen = gradient_compression(compression_params)
    named = {method.wire: method for method in (Compression.none, Compression.fp16, Compression.bf16)}
    return named.get(chosen.wire, chosen)
