"""What a round has shown so far: this replica's losses and optimizer steps, and everyone's once they are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.checks import LARGEST, FloatArray, mapping_of, numbers_of, shown
from hdet.replicas.agreement import Table
from hdet.replicas.group import Replicas
from hdet.signals.loss import Loss, LossMeter

ROWS = ("totals", "weights", "num_updates")


class Tally:
    """Losses and optimizer steps of the round that runs.

    Args:
        replicas: who takes part.
        updates_alike: whether all must take the same optimizer steps.
    """

    def __init__(self, replicas: Replicas, *, updates_alike: bool) -> None:
        self.replicas = replicas
        self.updates_alike = updates_alike
        self.meter = LossMeter()
        self.num_updates = 0
        self._shared: FloatArray | None = None

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        self.meter.observe(loss, weight)
        self._shared = None

    def share(self, table: Table) -> None:
        """Keep what all have seen by now: a state that is saved holds everyone's."""
        self._shared = np.stack([table.totals, table.weights, table.num_updates])

    def reset(self) -> None:
        """A round begins."""
        self.meter.reset()
        self.num_updates = 0
        self._shared = None

    def state_dict(self) -> dict[str, list[float]]:
        """Each replica's entry by name; empty lists where they were not shared since."""
        rows = self._shared if self._shared is not None else np.empty((len(ROWS), 0))
        return dict(zip(ROWS, rows.tolist(), strict=True))

    def check_state(self, state: Any, num_ranks: int) -> FloatArray | None:
        """Everyone's entries, shape (3, N); None where there are none, or of another number of replicas."""
        if num_ranks != self.replicas.count:
            return None
        rows = _unpack(state, num_ranks)
        if rows is not None and self.updates_alike and len(set(rows[2])) > 1:
            raise ValueError(f"num_updates must be alike where gradients are shared, but got {rows[2].tolist()}")
        return rows

    def load(self, rows: FloatArray | None) -> None:
        """Continue from what :meth:`check_state` has found."""
        self.reset()
        self._shared = rows
        if rows is not None:
            total, weight = (rows[:2, self.replicas.index] / self.replicas.num_parts).tolist()
            self.meter.reset(total, weight)
            self.num_updates = int(rows[2, self.replicas.index])


def _unpack(packed: Any, num_ranks: int) -> FloatArray | None:
    if packed is None:
        return None
    saved: Mapping[str, Any] = mapping_of(packed, "losses")
    # A loss may have been NaN or infinite. The rest is counted.
    totals = numbers_of(saved["totals"], "totals of the losses", None, finite=False)
    weights = numbers_of(saved["weights"], "weights of the losses", None, low=0)
    num_updates = numbers_of(saved["num_updates"], "num_updates of the losses", None, low=0, high=LARGEST)
    if not len(totals):
        return None
    if {len(totals), len(weights), len(num_updates)} != {num_ranks}:
        raise ValueError(f"losses must hold one entry for each of {num_ranks} replicas, but got {shown(packed)}")
    if (num_updates % 1).any():
        raise ValueError(f"num_updates of the losses must be integers, but got {shown(packed)}")
    return np.stack([totals, weights, num_updates])
