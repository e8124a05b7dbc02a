"""The input and the result of a target."""

from __future__ import annotations

import dataclasses
import time

from mykvrun.progress import Progress


class Budget:
    """A target's time limit and its first seed.

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
        """Remaining seconds; negative when the time is over."""
        return self._end - time.monotonic()

    def allows(self, tally: Tally) -> bool:
        """Whether to make another try."""
        if self._progress is not None:
            self._progress.tell(f"{tally.tried} tried, {len(tally.failures)} failed")
            self._progress.reach(self._seconds - self.left())
        return self.left() > 0 and (self.most is None or tally.tried < self.most)


@dataclasses.dataclass
class Tally:
    """The number of tries, and each failure with the information to repeat it."""

    tried: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    is_missing: bool = False  # nothing could be tried, for want of a tool that the notes name

    @property
    def survived(self) -> int:
        """Number of successes."""
        return self.tried - len(self.failures)

    def add(self, failure: str | None) -> None:
        """Count one try."""
        self.tried += 1
        if failure:
            self.failures.append(failure)
