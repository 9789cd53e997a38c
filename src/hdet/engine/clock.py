"""How long a converge takes, and a warning where that is too long."""

from __future__ import annotations

import math
import time
import warnings

SLOW_S = 1.0
"""A converge shorter than this is not worth a warning, whatever its share of the round."""
NUM_SLOW = 3
"""In a row: anything may take a second once."""


class Clock:
    """Times the converges of a run.

    Args:
        slow_share: of a round, above which a converge is slow.
    """

    def __init__(self, slow_share: float) -> None:
        self.slow_share = slow_share
        self._started = self._round_ended = math.nan
        self._num_slow = 0

    def start(self) -> None:
        """A converge begins."""
        self._started = time.perf_counter()

    def stop(self, step: int, interval: int) -> float:
        """Seconds since it began; a warning, once, where they are too many of its round's, three times in a row."""
        now = time.perf_counter()
        converge_s, round_s = now - self._started, now - self._round_ended
        self._round_ended = now
        share = converge_s / round_s if round_s > 0 else math.nan
        is_slow = converge_s > SLOW_S and share > self.slow_share
        self._num_slow = self._num_slow + 1 if is_slow or self._num_slow >= NUM_SLOW else 0
        if self._num_slow == NUM_SLOW:
            warnings.warn(
                f"the converge of step {step} took {converge_s:.1f} s, {share:.0%} of its round, and two before it as "
                f"long: a rank or the network is slow. Make rounds longer than {interval} steps, or ask `hdet doctor`. "
                "This warning is not repeated",
                stacklevel=5,
            )
        return converge_s
