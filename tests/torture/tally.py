"""What a target is given, and what it gives back."""

from __future__ import annotations

import dataclasses
import time

from mykvrun.progress import Progress


class Budget:
    """How long a target may go on, and the seed that it begins with.

    Parameters
    ----------
    seconds : float
    seed : int
    most : int, optional
        How often it tries at most, for tests; as often as time allows by default.
    progress : Progress, optional
        Shows the seconds that have passed.
    """

    def __init__(
        self, seconds: float, seed: int = 0, most: int | None = None, progress: Progress | None = None
    ) -> None:
        self.seed, self.most = seed, most
        self._seconds, self._progress = seconds, progress
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; below 0 when the time is over."""
        return self._end - time.monotonic()

    def allows(self, tally: Tally) -> bool:
        """Whether to try once more."""
        if self._progress is not None:
            self._progress.tell(f"{tally.tried} tried, {len(tally.failures)} failed")
            self._progress.reach(self._seconds - self.left())
        return self.left() > 0 and (self.most is None or tally.tried < self.most)


@dataclasses.dataclass
class Tally:
    """How often something was tried, and each failure in words that let it be tried again alone."""

    tried: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    is_missing: bool = False  # nothing could be tried, for want of a tool that the notes name

    @property
    def survived(self) -> int:
        """How many did not fail."""
        return self.tried - len(self.failures)

    def add(self, failure: str | None) -> None:
        """Count one try."""
        self.tried += 1
        if failure:
            self.failures.append(failure)
