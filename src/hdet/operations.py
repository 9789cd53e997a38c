"""How a run is operated: what is done about faults, and how replicas meet on a large cluster. All off by default."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import is_flag, number, require, whole


@dataclass(frozen=True)
class Operations:
    """Passed as ``operations=`` to AutoLR, OneCycleAutoLR and Explorer.

    Attributes:
        quarantine: leave a replica out of a round's mean and controller, and start it anew from the others' mean, when
            its loss is above the replicas' median by more than this many robust standard deviations (1.4826 times the
            median absolute deviation, of this round and of recent ones); None for never. 20 does not fire on healthy
            noise.
        skip_nonfinite: take the gradient out of a step when any of it is not finite, on the device and without
            waiting for it. One pass over the gradients in every step.
        overlap: let the mean travel during the next step instead of waiting for it; it is applied one step late. Two
            more copies of the weights meanwhile.
        node_size: replicas of a node, consecutive ranks; with ``node_rounds``.
        node_rounds: k: average within a node every round, and across nodes in every k-th only.
        slow_share: warn once when a converge takes more than this share of its round, and longer than a second.
        strict_rollbacks: raise when a round breaks and ``max_rollbacks`` are spent, instead of holding the scale still.

    Example:
        >>> from hdet import Operations
        >>> Operations(quarantine=20, overlap=True)  # doctest: +NORMALIZE_WHITESPACE
        Operations(quarantine=20, skip_nonfinite=False, overlap=True, node_size=None, node_rounds=1, slow_share=0.1,
                   strict_rollbacks=False)
    """

    quarantine: float | None = None
    skip_nonfinite: bool = False
    overlap: bool = False
    node_size: int | None = None
    node_rounds: int = 1
    slow_share: float = 0.1
    strict_rollbacks: bool = False

    def __post_init__(self) -> None:
        fine = self.quarantine is None or number(self.quarantine) > 1
        require(fine, "quarantine", "None or a finite number > 1", self.quarantine)
        require(is_flag(self.skip_nonfinite), "skip_nonfinite", "True or False", self.skip_nonfinite)
        require(is_flag(self.overlap), "overlap", "True or False", self.overlap)
        require(is_flag(self.strict_rollbacks), "strict_rollbacks", "True or False", self.strict_rollbacks)
        fine = self.node_size is None or whole(self.node_size) >= 1
        require(fine, "node_size", "None or an integer >= 1", self.node_size)
        require(whole(self.node_rounds) >= 1, "node_rounds", "an integer >= 1", self.node_rounds)
        require(number(self.slow_share) > 0, "slow_share", "a finite number > 0", self.slow_share)
        if self.node_rounds > 1 and self.node_size is None:
            raise ValueError(f"node_rounds needs node_size, the replicas of a node, but got {self!r}")


PLAIN = Operations()
