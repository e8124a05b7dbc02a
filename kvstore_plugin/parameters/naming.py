"""What messages call a parameter: as the ranks match it, and as this process names it."""

from __future__ import annotations

from typing import Any


def described(name: str, value: Any) -> str:
    """A Parameter or an array, named as ranks know it and as this process does, at the beginning of a sentence."""
    own = getattr(value, "name", name)
    # Where ranks count parameters, the name is 'parameter 3'.
    start = "" if name.startswith("parameter ") else "parameter "
    return f"{start}{name}".replace("p", "P", 1) + ("" if own == name else f" ({own})")


def described_within(name: str, value: Any) -> str:
    """The same, further on in a sentence."""
    text = described(name, value)
    return text[0].lower() + text[1:]
