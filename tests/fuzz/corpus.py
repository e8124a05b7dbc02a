"""The corpus of each parser, which is the inputs that fuzzing has found worth keeping: one zip per parser in corpus/.

The ordinary tests read the zips, and run.py unpacks them for its fuzzers.
``python tests/fuzz/corpus.py PARSER PATH...`` adds files, or the files of folders: what a fuzzer found, or an input
that a parser did not bear.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "corpus"


def parsers() -> list[str]:
    """The parsers that have a corpus."""
    return sorted(path.stem for path in FOLDER.glob("*.zip"))


def read(parser: str) -> dict[str, bytes]:
    """The inputs of a parser by their names; none if it has no corpus yet."""
    path = FOLDER / f"{parser}.zip"
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in sorted(archive.namelist())}


def add(parser: str, inputs: Iterable[bytes]) -> int:
    """Add inputs, named by their SHA-1 as libFuzzer does; return how many were new."""
    kept = read(parser)
    new = {hashlib.sha1(data).hexdigest(): data for data in inputs if data not in kept.values()}
    (FOLDER / f"{parser}.zip").write_bytes(packed({**kept, **new}))
    return len(new)


def packed(inputs: dict[str, bytes]) -> bytes:
    """A zip whose bytes depend on the inputs alone: sorted, dated 1980-01-01, and not compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in sorted(inputs.items()):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16  # the permissions after an unzip
            archive.writestr(entry, data)
    return file.getvalue()


def main(arguments: list[str] | None = None) -> None:
    """Add what the command line names."""
    parser = argparse.ArgumentParser(description="Add inputs to the corpus of a parser.")
    parser.add_argument("parser", choices=parsers())
    parser.add_argument("paths", nargs="+", type=Path, help="a file with one input, or a folder of such files")
    chosen = parser.parse_args(arguments)
    files = [file for path in chosen.paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    print(f"{add(chosen.parser, [file.read_bytes() for file in files])} new of {len(files)} inputs")


if __name__ == "__main__":
    sys.exit(main())
