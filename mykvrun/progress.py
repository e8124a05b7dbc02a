"""Progress of long work, by tqdm if it is installed and stderr is a terminal; otherwise not shown.

The self-test uses it, and so do benchmarks/, tests/torture/ and tests/wheels/. No installation needs tqdm.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Progress:
    """A bar below what the program prints; used as a context manager.

    Parameters
    ----------
    total : float
        The total amount.
    what : str
        Text before the bar.
    unit : str, optional
        Unit of `total`.
    """

    def __init__(self, total: float, what: str, unit: str = "") -> None:
        self._bar: Any = None
        if sys.stderr is None or not sys.stderr.isatty():
            return
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False, dynamic_ncols=True, file=sys.stderr)

    def advance(self, by: float = 1) -> None:
        """Advance by this amount."""
        if self._bar is not None:
            self._bar.update(by)

    def reach(self, done: float) -> None:
        """Set the completed amount, at most `total`."""
        if self._bar is not None:
            self._bar.update(min(done, self._bar.total) - self._bar.n)

    def tell(self, now: str) -> None:
        """Show the current activity."""
        if self._bar is not None:
            self._bar.set_postfix_str(now)

    def write(self, text: str) -> None:
        """Print a line to stderr."""
        if self._bar is not None:
            self._bar.clear()
        print(text, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
