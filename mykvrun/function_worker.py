"""A worker of function_job.py: ``python -m mykvrun.function_worker FOLDER``."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import worker_notes
from .function_job import FUNCTION, RESULT, Result


def main(folder: Path) -> None:
    """Call the function and write its result, or write the exception and raise it again to end this worker."""
    import cloudpickle

    rank = worker_notes.rank_in(os.environ) or 0
    file = folder / f"{RESULT}.{rank}"
    try:
        path, data = pickle.loads((folder / FUNCTION).read_bytes())
        file.unlink(missing_ok=True)  # the result of an attempt before a restart
    except FileNotFoundError:
        sys.exit(f"mykv.run: {folder} is not on this host. Give folder=, a folder that all hosts share.")
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    try:
        function, args, kwargs = pickle.loads(data)
        _write(file, Result(function(*args, **kwargs), None, "", time.time()), cloudpickle)
    except Exception as error:
        within = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of main()
        text = "".join(traceback.format_exception(type(error), error, within))
        failed = Result(None, error, text, time.time())
        try:
            pickle.loads(cloudpickle.dumps(error))
        except Exception:
            failed = failed._replace(error=None)
        _write(file, failed, cloudpickle)
        raise


def _write(file: Path, result: Result, cloudpickle: Any) -> None:
    """Write a result atomically."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_bytes(cloudpickle.dumps(result))
    os.replace(unfinished, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
