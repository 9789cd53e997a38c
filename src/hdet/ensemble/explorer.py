"""Explorer: any scalar hyperparameter, in a loop that keeps its own learning-rate schedule or has none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hdet.beside import refuse_second
from hdet.checks import require_one_of, whole_of
from hdet.ensemble.controllers import JointController
from hdet.ensemble.generations import Tail, check_long, last_decision, long_averaging, long_panel
from hdet.ensemble.knobs import Knob, LearningRate
from hdet.ensemble.options import Assignment, Averaging, Differing, Ensemble, check_knobs
from hdet.ensemble.outer import Nesterov
from hdet.ensemble.signals import ProbeSignal
from hdet.options import Adapt, Copies, Faults
from hdet.plan import Gradients, Plan, SignalName
from hdet.policy.steering import Panel
from hdet.run import LearningRates
from hdet.schedule import lrs_of, write_lr
from hdet.scheduler import STATE_VERSION, Scheduler, cannot_load, check_version
from hdet.signals.base import Signal
from hdet.signals.held_out import Probe
from hdet.weights.averaged import Weights

LR_OPTIMISM = 0.75
"""Optimism of the learning rate under the loss signal; other knobs have none."""

_UNUSED = {
    "groups": "Explorer has it in knobs.LearningRate(groups=...)",
    "level": "Explorer starts every knob from the value it has",
    "shape": "Explorer has no schedule whose shape could be kept",
    "act": "Explorer has nothing to watch but what its replicas do",
}
"""Of Adapt, with the reason."""


class Explorer(Scheduler):
    r"""Replicas train with different values of some knobs; what worked moves the shared values.

    Every ``interval`` steps the replicas' weights are averaged, the differences of their losses are attributed to
    their knobs by least squares, each base value moves as far as the evidence goes, and each replica gets new values.

    Call ``step(loss)`` after ``optimizer.step()``, and :meth:`finish` at the end: it averages the weights and leaves
    every knob at its base value. With ``total_steps`` the last step does that by itself.

    Args:
        model: the model that is trained, wrapped in DistributedDataParallel if it is.
        optimizer: its optimizer.
        knobs: of :mod:`hdet.knobs`. Without a ``LearningRate`` among them the learning rate is left alone, so any
            scheduler of torch's may drive it; AutoLR and OneCycleAutoLR take knobs themselves. With none at all and
            local gradients this is local SGD, or DiLoCo.
        interval: T, optimizer steps of a round.
        gradients: ``"shared"``: averaged in every step, as DistributedDataParallel does. ``"local"``: not at all inside
            a round, which cuts communication by a factor of T; replicas then see the effect of every knob.
        probe: a function that returns the loss on held-out data, the same on every replica. It is called at the end of
            a round in evaluation mode, and is what knobs learn from instead of the training loss.
        total_steps: length of the run, where it is known.
        horizon: how far ahead a knob is judged. ``"short"``: by what it does within a round, whose replicas are close
            together. ``"long"``: rounds are generations, a sixth of the run or so; replicas stand over a wide window of
            one knob, and go on from the fittest by held-out loss. For what regularises.
        assignment: how replicas share out the values of several knobs: ``"balanced"``, as orthogonal as their number
            allows, or ``"permutation"``, the paper's independent permutations.
        adapt: how base values adapt: controller, anchor, bounds and start.
        copies: where copies of the weights live.
        faults: what is done about broken rounds and replicas.
        averaging: how replicas are averaged, and what becomes of their optimizers' state.
        process_group: the ranks that train this model; default all of them.
        seed: of the assignments.

    Example:
        >>> import torch
        >>> from hdet import Explorer, knobs
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> held_out = torch.randn(8, 3)
        >>> def probe():
        ...     return model(held_out).square().mean()
        >>> explorer = Explorer(model, optimizer, knobs=[knobs.WeightDecay()], interval=10, probe=probe)
        >>> loss = model(torch.randn(4, 3)).square().mean()
        >>> loss.backward()
        >>> optimizer.step(); explorer.step(loss)
        >>> explorer.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        knobs: Sequence[Knob | LearningRate] = (),
        interval: int,
        gradients: Gradients = "shared",
        probe: Probe | None = None,
        total_steps: int | None = None,
        horizon: Literal["short", "long"] = "short",
        assignment: Assignment = "balanced",
        adapt: Adapt = Adapt(),
        copies: Copies = Copies(),
        faults: Faults = Faults(),
        averaging: Averaging = Averaging(),
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, but got {type(model).__name__}")
        require_one_of("horizon", horizon, "short", "long")
        check_knobs(knobs)
        rates = [knob for knob in knobs if isinstance(knob, LearningRate)]
        if len(rates) > 1:
            raise ValueError(f"knobs must contain LearningRate once at most, but got {len(rates)}")
        rate = rates[0] if rates else LearningRate(spread=0.0, adapt=False)
        is_long = horizon == "long"
        members = Explored(
            [knob for knob in knobs if isinstance(knob, Knob)], rate, adapt, is_long=is_long, gradients=gradients,
            averaging=averaging, assignment=assignment, seed=seed,
        )  # fmt: skip
        if isinstance(adapt, Adapt):
            adapt.refuse(_UNUSED)
        plan = Plan(
            optimizer=optimizer, model=model, interval=interval, total_steps=total_steps, probe=probe, adapt=adapt,
            copies=copies, faults=faults, process_group=process_group, members=members,
        )  # fmt: skip
        if is_long:
            check_long(plan, knobs)
        refuse_second(optimizer)
        members.bind(plan)
        if gradients == "shared" and isinstance(members.outer, Nesterov) and not knobs:
            raise ValueError('outer="nesterov" needs replicas that differ; use gradients="local", or pass knobs')
        if not knobs and gradients == "shared":
            raise ValueError('knobs must not be empty with gradients="shared": there would be nothing to explore')
        replicas = plan.find_replicas({"learning_rate": vars(rate), **plan.facts()})
        self.optimizer = optimizer
        self._schedule: Fixed = Fixed(optimizer, total_steps, explores_lr=bool(rates))
        self._last_lr = list(self._schedule.base_lrs)
        acting = (0, last_decision(plan)) if is_long else (plan.start_steps, math.inf)
        run = plan.make_run(
            replicas, controller=None, acting=acting, step=0, groups=rate.groups,
            bounds=None if rates else (1.0, 1.0), rollback=not is_long,
        )  # fmt: skip
        self._attach(optimizer, run)
        self._refresh()

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Optimizer steps taken, under the name that torch's schedulers have for it."""
        return self._schedule.step

    @property
    def total_steps(self) -> int | None:
        """Length of the run; None where it is unknown."""
        total = self._schedule.total_steps
        return None if math.isinf(total) else int(total)

    # -- training -----------------------------------------------------------------------------------------------

    def _left_alone(self) -> bool:
        return False

    def _look_closer(self, step: int) -> None:
        self._take_up_new_groups()
        if self._run.finished:
            raise RuntimeError(f"training was finished at step {self.last_epoch}; make a new Explorer to go on")
        if not self._schedule.explores_lr or not (step == self._schedule.total_steps or self._run.is_due(step)):
            return
        found = [float(group["lr"]) for group in self.optimizer.param_groups]
        mine = [float(lr) for lr in self._last_lr]
        if any(not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, mine, strict=False)):
            raise RuntimeError(
                f"learning rates must be left to the Explorer that explores them, but {mine} became {found}; "
                "with a schedule, use AutoLR(schedule, ensemble=Ensemble(knobs=[...])) instead of a LearningRate knob"
            )

    @contextmanager
    def converged(self) -> Iterator[None]:
        try:
            with super().converged():
                self._refresh()
                yield
        finally:
            self._refresh()

    def finish(self) -> None:
        super().finish()
        self._refresh()

    def _refresh(self) -> None:
        schedule, lrs = self._schedule, self._run.lrs
        if schedule.explores_lr:
            factors = lrs.base_factors if self._run.at_base else lrs.factors
            all_lrs = lrs.of_all(schedule.base_lrs)
            for group, lr, factor in zip(self.optimizer.param_groups, all_lrs, factors, strict=True):
                write_lr(group, float(lr * factor))
            self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _in_charge(self) -> bool:
        return self._run.active

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types and tensors, the same on every rank: save it on one, load it on all.

        Save it, the model and the optimizer inside :meth:`converged`, where the weights are the mean and every knob is
        at its base value.
        """
        self._take_up_new_groups()
        self._warn_if_apart()
        with self._run.lock:
            return {
                "version": STATE_VERSION,
                "step": self.last_epoch,
                "base_lrs": list(self._schedule.base_lrs),
                "rounds": self._run.state_dict(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write every knob. Load model and optimizer first.

        A state that cannot be used raises ValueError and changes nothing.
        """
        check_version(state_dict, "Explorer")
        self._take_up_new_groups()
        run, schedule = self._run, self._schedule
        with run.lock:
            try:
                step = whole_of(state_dict["step"], "step")
                lrs = lrs_of(state_dict["base_lrs"], "base_lrs", run.lrs.num_scheduled(state_dict["rounds"]))
                run.load_state_dict(state_dict["rounds"], step=step)
            except Exception as error:
                raise cannot_load(error) from error
            schedule.step, schedule.base_lrs = step, lrs
            self._refresh()


class Fixed:
    """Learning rates that stay as they are, or that something else drives: see :class:`hdet.schedule.Schedule`.

    Args:
        optimizer: whose learning rates these are.
        total_steps: length of the run; None where it is unknown.
        explores_lr: whether they are explored, so that nothing else may drive them.
    """

    counter = None
    counted = 0
    inside = ()

    def __init__(self, optimizer: Optimizer, total_steps: int | None, *, explores_lr: bool) -> None:
        self.optimizer = optimizer
        self.step = 0
        self.explores_lr = explores_lr
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.total_steps = self.last_step = math.inf if total_steps is None else total_steps

    @property
    def lrs(self) -> list[float]:
        """What the learning rates would be without exploration."""
        return self.base_lrs if self.explores_lr else [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def first_lr(self) -> float:
        return self.base_lrs[0]

    def check_untouched(self) -> None:
        pass

    def advance(self, lrs: LearningRates) -> bool:
        self.step += 1
        return False


class Explored(Differing):
    """Replicas that differ in knobs, the learning rate among them.

    Args:
        knobs: beside the learning rate.
        rate: how the learning rate is explored.
        adapt: with the controller.
        is_long: whether rounds are generations.
        gradients, averaging, assignment, seed: as in :class:`Ensemble`.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        rate: LearningRate,
        adapt: Adapt,
        *,
        is_long: bool,
        gradients: Gradients,
        averaging: Averaging,
        assignment: Assignment,
        seed: int,
    ) -> None:
        if is_long and isinstance(averaging, Averaging):
            averaging = long_averaging(averaging)
        ensemble = Ensemble(knobs=knobs, gradients=gradients, averaging=averaging, assignment=assignment, seed=seed)
        super().__init__(ensemble, spread=rate.spread)
        self.rate, self.adapt, self.is_long = rate, adapt, is_long
        self.num_lrs = 1

    def bind(self, plan: Plan) -> None:
        self.num_lrs = 1 if self.rate.groups == "together" else len(plan.optimizer.param_groups)
        super().bind(plan)

    def _panel(self) -> Panel:
        num_lrs = self.num_lrs
        if self.is_long:
            return long_panel(self.knobs, num_lrs)
        controller = self.adapt.controller
        if controller is None:
            controller = JointController(optimism=[LR_OPTIMISM] * num_lrs + [0.0] * len(self.knobs))
        adapts = self.rate.adapt or any(knob.adapt for knob in self.knobs)
        return self.knobs.panel(
            controller if adapts else None,
            moves_lrs=self.rate.adapt,
            balanced=self.ensemble.assignment == "balanced",
        )

    def _warn_alone(self) -> None:
        warnings.warn(
            "Explorer compares replicas, and there is one: training continues with every knob as it is. Start "
            "several with torchrun, and initialise the process group first",
            stacklevel=5,
        )

    def signals(self, plan: Plan, weights: Weights, signal: SignalName) -> list[Signal]:
        if plan.probe is not None and self.is_long:
            return [ProbeSignal(plan.probe, plan.model, Tail(weights, plan.interval))]
        return super().signals(plan, weights, signal)
