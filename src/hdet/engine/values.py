"""What every learning rate and knob is on this replica: schedule x learned scale x multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.engine.place import Place
from hdet.engine.state import joined_of
from hdet.knobs.knob_set import KnobSet
from hdet.policy.steering import Steering


class Values:
    """The steering's numbers as one replica has them.

    Args:
        optimizer: whose learning rates are steered.
        steering: scales and multipliers.
        knobs: those of the steering's panel.
        place: where the weights are; when training has finished, knobs are at their base.
        index: of this replica.
        knob_of_group: which of the steering's learning rates each param group has.
        one_scale: whether param groups that join later have the first of them, or new ones.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steering: Steering,
        knobs: KnobSet,
        place: Place,
        *,
        index: int,
        knob_of_group: list[int],
        one_scale: bool,
    ) -> None:
        self.optimizer = optimizer
        self.steering = steering
        self.knobs = knobs
        self.place = place
        self.index = index
        self.knob_of_group = knob_of_group
        self._one_scale = one_scale
        self.joined: list[float] = []
        """Of each param group that joined after the schedule was made, its share of the first one's."""
        self.joined_alike = True
        """Whether all replicas have the same there."""
        self.update()

    def update(self) -> None:
        """The steering has moved."""
        by_knob = (self.steering.effective * self.steering.multipliers[:, self.index]).tolist()
        self.factors: list[float] = [by_knob[knob] for knob in self.knob_of_group]
        """What the schedule's value of each param group is multiplied by."""
        self.write_knobs()

    def write_knobs(self, *, at_base: bool = False) -> None:
        """Give the knobs beside the learning rate their values, this replica's or the shared ones."""
        if len(self.knobs):
            shared = at_base or self.place.finished
            self.knobs.write(self.steering.positions(None if shared else self.index))

    @property
    def at_base(self) -> bool:
        """Whether the model at hand is the shared one, so that learning rates should be the base values too."""
        return self.place.finished or self.place.is_set_aside

    @property
    def base_factors(self) -> list[float]:
        """What the schedule's value of each param group is multiplied by at the shared centre."""
        scales: list[float] = self.steering.effective[self.knob_of_group].tolist()
        return scales

    def multipliers(self) -> list[float]:
        """This replica's multiplier of each param group."""
        mine = self.steering.multipliers[:, self.index].tolist()
        return [mine[knob] for knob in self.knob_of_group]

    # -- param groups that join ---------------------------------------------------------------------------------

    def add_groups(self) -> list[int]:
        """Take up param groups that were added to the optimizer; returns the learning rate that each has."""
        new = []
        for _ in self.optimizer.param_groups[len(self.knob_of_group) :]:
            new.append(0 if self._one_scale else self.steering.add_lr())
            self.knob_of_group.append(new[-1])
        for knob in self.knobs:
            knob.add_groups()
        self.update()
        return new

    def set_joined(self, shares: list[float]) -> None:
        """What all replicas have from here on."""
        self.joined, self.joined_alike = shares, True

    def of_all(self, schedule: Sequence[float | Tensor]) -> list[float | Tensor]:
        """The schedule's values of all param groups, from those of the groups it knows."""
        if not self.joined:
            return list(schedule)
        return [*schedule, *(share * schedule[0] for share in self.joined)][: len(self.knob_of_group)]

    def scaled(self, schedule: Sequence[float | Tensor]) -> list[float | Tensor]:
        """This replica's learning rate of each param group, where the schedule gives these to those it knows."""
        return [lr * factor for lr, factor in zip(self.of_all(schedule), self.factors, strict=True)]

    def num_scheduled(self, state: Any) -> int:
        """How many of the param groups, the first ones, the schedule of a saved state knows."""
        num_groups, num_joined = len(self.knob_of_group), len(joined_of(state))
        if num_joined >= num_groups:
            raise ValueError(f"joined must leave out the first of {num_groups} param groups, but got {num_joined}")
        return num_groups - num_joined
