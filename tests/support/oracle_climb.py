"""The climb (Eq. 14) once more, slowly: all steps so far are looked at again in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Step = tuple[float, float]
"""Loss and slope of a step."""


def climb(steps: Sequence[Step], first_lr: float, total_steps: int) -> tuple[list[float], list[str], float]:
    """The learning rate of each step, how each attempt ended ("" for the one that goes on), and the next scale."""
    cap = min(max(total_steps / 10, 24), total_steps / 4, 200)
    scale = 0.01
    still: list[float] = []
    moving: list[float] = []  # losses after that, until the last rise
    lrs: list[float] = []
    endings: list[str] = []
    at = 0
    while True:
        used, ending, scale, raised, still, ok = _attempt(steps[at:], first_lr, scale, still, moving, cap - at)
        lrs += used
        at += len(used)
        endings.append(ending)
        if ending == "":
            return lrs, endings, scale
        if ending == "limit" or raised > 1 or len(endings) > 6:
            return lrs, endings, ok / {"turned": 2, "broken": 4, "limit": 2.5}[ending]
        scale /= 100 * math.exp(0.7 * raised)
        still = still[:1]


def _noise(still: Sequence[float], moving: Sequence[float]) -> tuple[float, float]:
    """Standard deviation of a loss, and what to multiply it by because it is not known exactly."""
    bends = [(a - 2 * b + c) ** 2 / 6 for a, b, c in zip(moving, moving[1:], moving[2:], strict=False)]
    num = max(len(still) - 1 + len(bends), 1)
    variance = (float(np.square(np.array(still) - np.mean(still)).sum()) + sum(bends)) / num
    if len(bends) >= 4:
        variance = max(variance, float(np.mean(bends)))
    return max(math.sqrt(variance), 1e-3 * abs(float(np.mean(still))), 1e-30), 1 + 2 / num + 20 / num**3


def _attempt(
    steps: Sequence[Step], first_lr: float, scale: float, still: list[float], moving: list[float], cap: float
) -> tuple[list[float], str, float, int, list[float], float]:
    still = list(still)
    used: list[float] = []
    far, raised, ok = True, 0, scale
    lowest, steepest = math.inf, 0.0
    since: list[tuple[float, float]] = []  # loss, slope / path, since the last rise
    for loss, slope in steps:
        lr, path = first_lr * scale, sum(used)
        used.append(lr)
        if not math.isfinite(loss):
            return used, "broken", scale, raised, still, ok
        if far and len(still) >= 2:
            noise, doubt = _noise(still, moving)
            far = abs(loss - float(np.mean(still))) <= 4 * doubt * noise
        if far or len(still) < 2:
            still.append(loss)
        since.append((loss, slope / path if path > 0 else math.nan))
        ending, rise = "", 0.0
        if path > 0:
            ys = np.array([y for _, y in since if math.isfinite(y)])
            first = float(np.mean(still))
            noise, doubt = _noise(still, moving)
            if far and len(still) >= 3 and abs(slope) < 0.1 * noise:
                rise = 1.4
            else:
                far = far and len(still) < 3
                z = math.nan
                if len(ys) > 1:
                    z = ys.mean() / (math.sqrt(np.square(np.diff(ys)).sum() / (2 * (len(ys) - 1) * len(ys))) + 1e-300)
                at_this = np.array([each for each, _ in since])
                falls = False
                if len(at_this) >= 4:
                    half = len(at_this) // 2
                    early, late = at_this[:half], at_this[-half:]
                    spread = max(noise, math.sqrt(np.square(np.diff(at_this)).mean() / 2))
                    falls = late.mean() < min(first, lowest, early.min())
                    falls = bool(falls and early.mean() - late.mean() > 3 * spread * math.sqrt(2 / half))
                clear = falls or (len(ys) == 2 and steepest > 0 and ys.max() < -steepest / 2)
                recent = float(np.mean([each for each, _ in since[-4:]]))
                top = min(lowest, first) + max(0.35 * max(first - lowest, 0), 2.5 * doubt * noise)
                if loss > first + 8 * doubt * noise or (not clear and len(ys) >= 4 and recent > top):
                    ending = "broken"
                elif clear or (len(ys) >= 4 and z < -2):
                    lowest = min(lowest, float(np.mean([each for each, _ in since])))
                    rise = 1.4 if steepest > 0 and -ys.mean() > 0.8 * steepest else 0.7
                    steepest = max(steepest, -float(ys.mean()))
                elif len(ys) >= 16 or (len(ys) >= 4 and z > 2):
                    ending = "turned"
        if rise:
            if not far:
                moving += [each for each, _ in since]
            ok, scale, raised, since = scale, scale * math.exp(rise), raised + 1, []
        if not ending and len(used) >= cap:
            ending = "flat" if far else "limit"
        if ending:
            return used, ending, scale, raised, still, ok
    return used, "", scale, raised, still, ok
