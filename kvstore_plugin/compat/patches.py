"""Replacements of MXNet's functions: the decorator, and the table for docs/reference/mxnet.md.

The import of the package installs the replacements of functions that a program may call before it calls this package.
The first init(), which each store and trainer calls, installs all other replacements. No name is replaced twice, even
if a module is imported or reloaded a second time.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, NamedTuple, Sequence

from .mxnet import MAJOR, mx

AT_IMPORT = "import"
AT_INIT = "first `init()`"

_MARK = "_replaced_by_mykv"


class Patch(NamedTuple):
    """A replacement of one name of MXNet."""

    owner: str  # module, class or object that holds the name, as an attribute of mxnet
    name: str
    releases: tuple[int, ...]  # major numbers of the releases in which the name is replaced
    when: str  # AT_IMPORT or AT_INIT
    why: str
    does: str
    undone_by: str  # when, or for which calls, MXNet's own function runs unchanged
    replacement: Callable
    makes: bool  # whether `replacement` is a function that returns the new value of the name


_table: dict[str, Patch] = {}
# The owners of the names, found at import, since a program may set `gluon.Trainer = DistributedTrainer` before init().
_owners: dict[str, Any] = {}
# For each replacement: the owner, the name, the original, and whether the owner itself (not a base class) had the name.
_replaced: list[tuple[Any, str, Any, bool]] = []
# MXNet's original for each replacement that is a function.
originals: dict[Callable, Callable] = {}


def replaces(
    *names: str,
    why: str,
    does: str,
    undone_by: str,
    when: str = AT_IMPORT,
    releases: Sequence[int] = (1, 2),
    makes: bool = False,
) -> Callable[[Callable], Callable]:
    """Replace attributes of MXNet by a function.

    Parameters
    ----------
    names : str
        Such as ``"gluon.Trainer.step"``. The function is called with MXNet's original as its first argument.
    why, does, undone_by, when : str
        For the table; see `Patch`.
    releases : sequence of int
        Major numbers of the releases of MXNet in which the names are replaced. Other releases may lack the names.
    makes : bool
        The function is called once, with MXNet's original or None as its only argument, and returns the new value.

    Raises
    ------
    ValueError
        Another function already replaces one of the names.
    AttributeError
        MXNet does not have one of the names.
    """

    def register(replacement: Callable) -> Callable:
        for name in names:
            owner, _, attribute = name.rpartition(".")
            patch = Patch(owner, attribute, tuple(releases), when, why, does, undone_by, replacement, makes)
            if _origin(_table.setdefault(name, patch)) != _origin(patch):
                raise ValueError(f"{name} is replaced by {_origin(_table[name])} and by {_origin(patch)}.")
            if MAJOR in patch.releases:
                _owners.setdefault(name, operator.attrgetter(owner)(mx))
            if when == AT_IMPORT:
                _put(patch)
        return replacement

    return register


def install() -> None:
    """Install the replacements that are due at the first init()."""
    for patch in _table.values():
        _put(patch)


def table() -> list[Patch]:
    """All replacements, including those for other releases of MXNet, sorted by name."""
    return [_table[name] for name in sorted(_table)]


def undo() -> None:
    """Put all of MXNet's originals back. For tests only: the behaviour of existing trainers changes."""
    while _replaced:
        owner, name, original, was_own = _replaced.pop()
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _put(patch: Patch) -> None:
    if MAJOR not in patch.releases:
        return
    owner = _owners[f"{patch.owner}.{patch.name}"]
    original = getattr(owner, patch.name, None) if patch.makes else getattr(owner, patch.name)
    if hasattr(original, _MARK):
        return
    replacement = patch.replacement(original) if patch.makes else _before(original, patch.replacement)
    setattr(replacement, _MARK, True)
    _replaced.append((owner, patch.name, original, patch.name in vars(owner)))
    setattr(owner, patch.name, replacement)


def _before(original: Callable, replacement: Callable) -> Callable:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    originals[replaced] = original
    return replaced


def _origin(patch: Patch) -> str:
    return f"{patch.replacement.__module__}.{patch.replacement.__qualname__}"
