"""What a run has found: the learning rates as they were, to look at, to keep, and to train with again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.checks import as_int, mapping_of, numbers_of, require, shown, whole_of

FORMAT = "hdet.Found 1"


@dataclass(frozen=True)
class Found:
    """The learning rates of a run; ``scheduler.found()`` returns it.

    Attributes:
        names: of the param groups.
        steps: optimizer steps of the run, in rising order.
        lrs: ``lrs[i][k]``, the learning rate of param group k after ``steps[i]``; NaN before it joined.
        total_steps: of the run; None while it is unknown.
        weight_decays: where it was learned, the last weight decay of each param group; nothing otherwise.

    Example:
        >>> from hdet import Found
        >>> found = Found(("all",), (0, 10, 100), ((0.0,), (0.1,), (0.0,)), 100)
        >>> found.peak_lrs
        (0.1,)
        >>> print(found)
        peak learning rate 0.1, at step 10 of 100
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    lrs: tuple[tuple[float, ...], ...]
    total_steps: int | None = None
    weight_decays: tuple[float, ...] = ()

    @property
    def peak_lrs(self) -> tuple[float, ...]:
        """The highest learning rate of each param group."""
        return tuple(np.nanmax(np.array(self.lrs), axis=0).tolist()) if self.lrs else ()

    def __str__(self) -> str:
        if not self.lrs:
            return "nothing yet: no round has ended"
        peaks, at = self.peak_lrs, self.steps[int(np.nanargmax(np.array(self.lrs)[:, 0]))]
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        same = len(set(peaks)) == 1
        text = f"peak learning rate {peaks[0]:.3g}, at step {at}{of}"
        if not same:
            by_name = ", ".join(f"{name} {peak:.3g}" for name, peak in zip(self.names, peaks, strict=True))
            text = f"peak learning rates {by_name}; the first at step {at}{of}"
        if self.weight_decays:
            text += "; weight decay " + " ".join(dict.fromkeys(f"{value:.3g}" for value in self.weight_decays))
        return text

    def as_schedule(self, optimizer: Optimizer, total_steps: int | None = None) -> LambdaLR:
        """A plain LambdaLR that gives ``optimizer`` these learning rates again, from its first step on.

        Between the points that are known, values lie on a line. The optimizer's own learning rates are overwritten; its
        weight decay is left alone.

        Args:
            optimizer: with as many param groups.
            total_steps: stretch the curve to a run of so many steps; default as long as it was.
        """
        if not self.lrs:
            raise ValueError(f"there is no curve to replay: {self}")
        groups = optimizer.param_groups
        if len(groups) != len(self.names):
            raise ValueError(f"optimizer must have {len(self.names)} param groups, but got one with {len(groups)}")
        require(total_steps is None or as_int(total_steps) >= 1, "total_steps", "None or an integer >= 1", total_steps)
        steps = np.array(self.steps, dtype=np.float64) - self.steps[0]
        if total_steps is not None:
            length = (self.total_steps or self.steps[-1]) - self.steps[0]
            steps *= total_steps / max(length, 1)
        shares: list[Callable[[int], float]] = []
        for group, peak, column in zip(groups, self.peak_lrs, np.array(self.lrs).T, strict=True):
            group["lr"] = peak
            group.pop("initial_lr", None)
            known = np.isfinite(column)
            rows = (steps[known].tolist(), (column[known] / peak if peak > 0 else column[known]).tolist())
            shares.append(partial(_interpolated, *rows))
        return LambdaLR(optimizer, shares)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; :meth:`load` reads it."""
        data = {"format": FORMAT, **asdict(self)}
        data["lrs"] = [[value if math.isfinite(value) else None for value in row] for row in self.lrs]
        Path(path).write_text(json.dumps(data, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Found:
        """What :meth:`save` wrote; ValueError where it is something else."""
        try:
            data: Any = mapping_of(json.loads(Path(path).read_text()), "a saved Found")
            if data["format"] != FORMAT:
                raise ValueError(f"format must be {FORMAT!r}, but got {shown(data['format'])}")
            names = tuple(str(name) for name in data["names"])
            steps = numbers_of(data["steps"], "steps", None, low=0)
            rows = [[math.nan if value is None else value for value in row] for row in data["lrs"]]
            lrs = numbers_of(rows, "lrs", len(steps), len(names), low=0, finite=False) if rows else np.empty((0, 0))
            total = data["total_steps"]
            return cls(
                names,
                tuple(int(step) for step in steps),
                tuple(tuple(row) for row in lrs.tolist()),
                None if total is None else whole_of(total, "total_steps"),
                tuple(numbers_of(data.get("weight_decays", []), "weight_decays", None, low=0).tolist()),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} must be a file of Found.save(), but cannot be read: {type(error).__name__}: {error}"
            ) from error


def _interpolated(steps: list[float], shares: list[float], step: int) -> float:
    return float(np.interp(step, steps, shares))
