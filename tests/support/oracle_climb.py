"""The climb (Eq. 14) once more, slowly: all steps so far are looked at again in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Step = tuple[float, float]
"""Loss and slope of a step."""


def climb(steps: Sequence[Step], first_lr: float, total_steps: int) -> tuple[list[float], list[str], float]:
    """The learning rate of each step, how each attempt ended ("" for the one that goes on), and the next scale."""
    caps = min(max(total_steps / 10, 24), total_steps / 4, 200), min(total_steps / 4, 200)
    scale = 0.01
    still: list[float] = []
    moving: list[float] = []  # losses after that, until the last rise
    lrs: list[float] = []
    endings: list[str] = []
    at = 0
    while True:
        left = int(caps[0]) - at, int(caps[1]) - at
        used, ending, scale, raised, still, ok = _attempt(steps[at:], first_lr, scale, still, moving, left)
        lrs += used
        at += len(used)
        if ending == "flat" and endings:
            ending = "limit"
        endings.append(ending)
        if ending == "":
            return lrs, endings, scale
        if ending == "flat":
            return lrs, endings, 1.0
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
    return max(math.sqrt(variance), 1e-3 * abs(float(np.mean(still))), 1e-30), _doubt(num)


def _doubt(num: int) -> float:
    return 1 + 2 / num + 20 / num**3


def _was_noise(
    still: Sequence[float], moving: Sequence[float], fresh: Sequence[float], slopes: Sequence[float]
) -> bool:
    if len(fresh) < 4:
        return False
    if all(slope == 0 for slope in slopes):
        return True
    first = float(np.mean(still))
    noise, doubt = _noise(still, moving)
    before = max(len(still) - 1 + max(len(moving) - 2, 0), 1)
    bends = [(a - 2 * b + c) ** 2 / 6 for a, b, c in zip(fresh, fresh[1:], fresh[2:], strict=False)]
    pooled = math.sqrt((before * noise**2 + sum(bends)) / (before + len(bends)))
    if np.max(np.abs(slopes)) >= 0.1 * pooled or min(fresh) < first - 8 * doubt * noise:
        return False
    root = math.sqrt(1 / len(fresh) + 1 / len(still))
    if sum(slopes) > 0:
        return bool(abs(np.median(fresh) - first) <= 4 * doubt * noise * root)
    return bool(np.mean(fresh) - first >= -4 * _doubt(before + len(bends)) * pooled * root)


def _attempt(
    steps: Sequence[Step], first_lr: float, scale: float, still: list[float], moving: list[float], caps: tuple[int, int]
) -> tuple[list[float], str, float, int, list[float], float]:
    still = list(still)
    used: list[float] = []
    far, raised, ok = True, 0, scale
    lowest, steepest = math.inf, 0.0
    since: list[tuple[float, float, float]] = []  # loss, slope / path, slope, since the last rise
    fresh: list[float] = []  # of these losses, those that are not among the still ones
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
        else:
            fresh.append(loss)
        since.append((loss, slope / path if path > 0 else math.nan, slope))
        ending, rise = "", 0.0
        if path > 0:
            ys = np.array([y for _, y, _ in since if math.isfinite(y)])
            first = float(np.mean(still))
            noise, doubt = _noise(still, moving)
            if far and len(still) >= 3 and abs(slope) < 0.1 * noise:
                rise = 1.4
            else:
                far = far and len(still) < 3
                z = math.nan
                if len(ys) > 1:
                    z = ys.mean() / (math.sqrt(np.square(np.diff(ys)).sum() / (2 * (len(ys) - 1) * len(ys))) + 1e-300)
                at_this = np.array([each for each, *_ in since])
                falls = False
                if len(at_this) >= 4:
                    half = len(at_this) // 2
                    early, late = at_this[:half], at_this[-half:]
                    spread = max(noise, math.sqrt(np.square(np.diff(at_this)).mean() / 2))
                    falls = late.mean() < min(first, lowest, early.min())
                    falls = bool(falls and early.mean() - late.mean() > 3 * spread * math.sqrt(2 / half))
                clear = falls or (len(ys) == 2 and steepest > 0 and ys.max() < -steepest / 2)
                recent = float(np.median([each for each, *_ in since[-4:]]))
                top = min(lowest, first) + max(0.35 * max(first - lowest, 0), 2.5 * doubt * noise)
                jumped = loss > first + 8 * doubt * noise and slope > 0.1 * (loss - first)
                blamed = recent < first or sum(each for *_, each in since[-4:]) > 0
                if _was_noise(still, moving, fresh, [each for *_, each in since[-len(fresh) :]]):
                    still += fresh
                    far, rise = True, 1.4
                elif jumped or (not clear and len(ys) >= 4 and recent > top and blamed):
                    ending = "broken"
                elif clear or (len(ys) >= 4 and z < -2):
                    lowest = min(lowest, float(np.mean([each for each, *_ in since])))
                    rise = 1.4 if steepest > 0 and -ys.mean() > 0.8 * steepest else 0.7
                    steepest = max(steepest, -float(ys.mean()))
                elif len(ys) >= 16 or (len(ys) >= 4 and z > 2):
                    ending = "turned"
        if rise:
            if not far:
                moving += [each for each, *_ in since]
            ok, scale, raised, since, fresh = scale, scale * math.exp(rise), raised + 1, [], []
        if not ending and len(used) >= caps[far and raised > 0]:
            ending = "flat" if far else "limit"
        if ending:
            return used, ending, scale, raised, still, ok
    return used, "", scale, raised, still, ok
