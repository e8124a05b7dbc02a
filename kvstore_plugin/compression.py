"""How gradients are packed for the wire; today only as they are."""

from __future__ import annotations


class _Method:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """Choices for the argument `compression` of `DistributedTrainer`.

    Attributes
    ----------
    none
        Gradients travel in their own dtype.
    fp16, bf16
        Gradients travel in 16 bits. Not built yet: `DistributedTrainer` raises NotImplementedError.
    """

    none = _Method("none")
    fp16 = _Method("fp16")
    bf16 = _Method("bf16")


def check(compression: object) -> None:
    """Raise what is wrong with a value of the argument `compression`.

    Raises
    ------
    NotImplementedError
        It is not built yet.
    TypeError
        It is none of the attributes of `Compression`.
    """
    if not isinstance(compression, _Method):
        raise TypeError(
            f"compression must be an attribute of Compression, such as Compression.none, not {compression!r}."
        )
    if compression is not Compression.none:
        raise NotImplementedError(f"{compression!r} is not built yet, use Compression.none.")
