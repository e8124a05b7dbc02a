"""Files with each rank's output, for --output-filename and --log-dir."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from .errors import LaunchError
from .sinks import Loss, Sink


class RankFolders(NamedTuple):
    """Folders for the requested files."""

    streams: str | None = None  # the folder of --output-filename, for rank.3/stdout and rank.3/stderr
    logs: str | None = None  # the folder of --log-dir, for rank.3.log with both streams

    def of_attempt(self, restart: int, workers: int) -> RankFolders:
        """Create the folders for one attempt of a job.

        Raises
        ------
        LaunchError
            A folder cannot be created, or a file is in a folder's place or a folder in a file's place.
        """
        made = []
        for name, option in zip(self, ("--output-filename", "--log-dir")):
            folder = Path(name, f"restart.{restart}") if name and restart else Path(name) if name else None
            try:
                if folder:
                    folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"The folder {folder} of {option} cannot be created: {error.strerror}.") from None
            made.append(str(folder) if folder else None)
        folders = RankFolders(*made)
        folders._check(workers)
        return folders

    def _check(self, workers: int) -> None:
        for rank in range(workers):
            if self.streams and (path := Path(self.streams, f"rank.{_digits(rank, workers)}")).is_file():
                raise LaunchError(f"{path} is a file, but --output-filename needs a folder there: move the file away.")
            if self.logs and (path := Path(self.logs, f"rank.{_digits(rank, workers)}.log")).is_dir():
                raise LaunchError(f"{path} is a folder, but --log-dir needs a file there: move the folder away.")

    def paths(self, rank: int, workers: int, stream: str) -> list[Path]:
        """The files for a rank's ``"stdout"`` or ``"stderr"``."""
        name = f"rank.{_digits(rank, workers)}"
        found = [Path(self.streams, name, stream)] if self.streams else []
        return [*found, Path(self.logs, f"{name}.log")] if self.logs else found


def _digits(rank: int, workers: int) -> str:
    """A rank, zero-padded so that names sort in the order of ranks."""
    return f"{rank:0{len(str(workers - 1))}}"


class RankFiles:
    """The files of all ranks. The threads that read stdout and stderr may call it at the same time.

    Parameters
    ----------
    folders : RankFolders
    workers : int
        The number of ranks.
    on_loss : callable
        Called with the name of a file that cannot be written, and the error.
    """

    def __init__(self, folders: RankFolders, workers: int, on_loss: Loss) -> None:
        self._folders, self._workers, self._on_loss = folders, workers, on_loss
        self._files: dict[Path, Sink] = {}
        self._of: dict[tuple[int, str], list[Sink]] = {}
        self._lock = threading.Lock()

    def write(self, rank: int, line: bytes, stream: str) -> None:
        """Write a line of a rank to its files."""
        for file in self._of.get((rank, stream)) or self._opened(rank, stream):
            file.write(line)

    def _opened(self, rank: int, stream: str) -> list[Sink]:
        with self._lock:
            files = []
            for path in self._folders.paths(rank, self._workers, stream):
                if path not in self._files:
                    self._files[path] = Sink.of_path(path, self._on_loss)
                files.append(self._files[path])
            self._of[rank, stream] = files
            return files

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
