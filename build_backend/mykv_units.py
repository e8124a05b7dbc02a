"""The compiler's inputs: each source file alone, or a folder's source files as one unit.

Most of the time is spent on reading headers, especially pybind11's. A unit reads them once, which halves the time of an
installation. In a developer's tree each file is compiled alone, so that a change recompiles little.

Names in the anonymous namespaces of a folder's files must therefore differ.
"""

import re
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, List, Set

# Files that are compiled with the flags of one instruction set, or as the generic form of such files.
_ONE_INSTRUCTION_SET = ("_avx2", "_avx512", "_generic")


def folder_units(sources: Iterable[Path], root: Path, where: Path) -> List[Path]:
    """Write a file for each folder, which includes the folder's sources.

    Parameters
    ----------
    sources : iterable of Path
        The source files, below `root`.
    root : Path
        The folder that includes are relative to. Files directly in it are combined with the bindings in its folder
        `python`.
    where : Path
        The folder for the units; only files whose text differs are written.

    Returns
    -------
    list of Path
        The units, and the sources that stay single.
    """
    members: Dict[Path, List[Path]] = {}
    alone: List[Path] = []
    for source in sorted(sources):
        folder = source.parent.relative_to(root)
        if source.stem.endswith(_ONE_INSTRUCTION_SET):
            alone.append(source)
        else:
            members.setdefault(folder if folder.parts else Path("python"), []).append(source.relative_to(root))
    return [_write(where / f"{'_'.join(folder.parts)}.cpp", files) for folder, files in members.items()] + alone


def units_by_needs(sources: Iterable[Path], root: Path, where: Path) -> Dict[FrozenSet[str], List[Path]]:
    """Like `folder_units`, but with separate units for source files that need different external headers.

    Parameters
    ----------
    sources, root, where
        As of `folder_units`.

    Returns
    -------
    dict
        The units by what they need: ``"mpi"``, ``"python"``, both or neither.
    """
    groups: Dict[FrozenSet[str], List[Path]] = {}
    for source in sources:
        groups.setdefault(needs_of(source, root), []).append(source)
    return {needs: folder_units(group, root, where / _name(needs)) for needs, group in groups.items()}


def needs_of(source: Path, root: Path) -> FrozenSet[str]:
    """The external headers that a source file includes, directly or through headers below `root`: ``"mpi"``,
    ``"python"``.

    If this misses a header, the compiler fails, since it gets no path to other headers.
    """
    needs: Set[str] = set()
    seen: Set[Path] = set()
    left = [source]
    while left:
        file = left.pop()
        seen.add(file)
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(encoding="utf-8"), re.MULTILINE):
            if name == "mpi.h":
                needs.add("mpi")
            elif name == "Python.h" or name.startswith("pybind11/"):
                needs.add("python")
            elif (root / name).is_file() and root / name not in seen:
                left.append(root / name)
    return frozenset(needs)


def _name(needs: FrozenSet[str]) -> str:
    return "-".join(sorted(needs)) or "neither"


def _write(unit: Path, files: List[Path]) -> Path:
    text = "".join(f'#include "{file.as_posix()}"\n' for file in files)
    if not unit.exists() or unit.read_text() != text:
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    return unit
