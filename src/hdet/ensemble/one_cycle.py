"""OneCycleAutoLR: the paper's method in the shape of torch's OneCycleLR."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.beside import refuse_second
from hdet.checks import as_int, is_flag, is_whole, mapping_of, number, require, require_one_of, shown
from hdet.ensemble.controllers import PaperController
from hdet.ensemble.knobs import Momentum
from hdet.ensemble.options import Ensemble
from hdet.options import Adapt, Copies, Faults
from hdet.plan import Plan
from hdet.run import LearningRates, Run
from hdet.schedule import LRS, MAX_LR, MOMENTA, check_one_cycle_state, follow_momentum, with_groups, write_lr
from hdet.scheduler import STATE_VERSION, Scheduler, cannot_load, check_version
from hdet.signals.held_out import Probe

DecayKind = Literal["schedule", "floor", "printed"]

_TORCHS = tuple(name for name in inspect.signature(OneCycleLR).parameters if name != "verbose")
"""Arguments of OneCycleLR; the one left out is deprecated, and in old versions of torch alone."""

_HAS_UPDATE_LR = hasattr(OneCycleLR, "_update_lr")
"""Since torch 2.9 every way of moving a schedule comes through that method."""

AGREED = (
    "ensemble_lr_spread_ratio", "model_sync_interval", "auto_lr_warmup_steps", "enable_auto_lr", "loss_scale",
    "lr_of_lr", "momentum_of_lr", "decay",
)  # fmt: skip
"""Further arguments that all ranks must agree on, beside those that all schedulers have."""


class OneCycleAutoLR(Scheduler, OneCycleLR):
    r"""Torch's OneCycleLR, with replicas that disagree about the learning rate on purpose.

    Each replica trains with its own multiple of the schedule's learning rate (Eq. 1 and 2), every
    ``model_sync_interval`` steps and at the last step the weights are averaged (Eq. 3), and with ``enable_auto_lr`` the
    shared learning rate of every param group moves towards what worked (Eq. 4 to 8). With
    ``ensemble_lr_spread_ratio=0`` and auto-LR off this *is* OneCycleLR, to the last bit. With one process it warns once
    and trains as OneCycleLR.

    Call ``step(loss)`` after ``optimizer.step()``. All ranks must construct, step and converge together.

    Args:
        optimizer: as in OneCycleLR, and so are all arguments up to ``last_epoch``.
        last_epoch: continues the schedule from there; what the controller learned comes back only through
            :meth:`load_state_dict`.
        ensemble_lr_spread_ratio: alpha in [0, 1): replicas use learning rates from (1 - alpha) to (1 + alpha) times
            the base.
        model_sync_interval: T >= 1, optimizer steps between converges.
        auto_lr_warmup_steps: steps before the controller may act; it acts at converges after that.
        enable_auto_lr: whether the controller acts at all.
        loss_scale: sigma > 0, temperature of the softmax over replicas.
        lr_of_lr: lambda >= 0, how far the base moves with the velocity.
        momentum_of_lr: beta in [0, 1), smoothing of the velocity.
        rank, world_size: accepted for compatibility and ignored; the process group decides.
        model: average its buffers too (BatchNorm statistics): floats become the mean, integers the maximum.
        process_group: the ranks that hold replicas; default all of them.
        decay: how the base falls while auto-LR is on. ``"schedule"``: as OneCycleLR does. ``"floor"``: geometrically,
            from the peak or from ``auto_lr_warmup_steps``, whichever is later, to the schedule's ``min_lr`` at the end.
            ``"printed"``: the same towards ``final_div_factor / div_factor`` of the start, as Eq. 8 is printed; refused
            where that would grow the learning rate.
        probe: a function that returns the loss on held-out data, by which replicas are compared.
        faults: what is done about broken rounds and replicas.
        ensemble: knobs to explore beside the learning rate, whose base values move after ``auto_lr_warmup_steps``, with
            or without ``enable_auto_lr``; gradients, averaging and seed.

    Example:
        >>> import torch
        >>> from hdet import OneCycleAutoLR
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([weights], lr=0.1)
        >>> scheduler = OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=10, model_sync_interval=5)
        >>> loss = (weights ** 2).sum()
        >>> loss.backward()
        >>> optimizer.step(); scheduler.step(loss)
    """

    _run: Run = None  # type: ignore[assignment] # while torch constructs the schedule
    _advice = "OneCycleAutoLR has its own schedule; AutoLR(schedule) goes around any others"

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        auto_lr_warmup_steps: int = 100_000,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        rank: int = 0,
        world_size: int = 1,
        *,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        decay: DecayKind = "schedule",
        probe: Probe | None = None,
        faults: Faults = Faults(),
        ensemble: Ensemble = Ensemble(),
    ) -> None:
        given = dict(locals())
        check_one_cycle(given)
        if not isinstance(ensemble, Ensemble):
            raise TypeError(f"ensemble must be an hdet.ensemble.Ensemble, but got {type(ensemble).__name__}")
        if ensemble.spread:
            raise ValueError(
                "spread must be left out: OneCycleAutoLR has it as ensemble_lr_spread_ratio; got "
                f"spread={ensemble.spread!r}"
            )
        spread = ensemble_lr_spread_ratio
        members = ensemble.members(
            spread=spread,
            alone=f"ensemble_lr_spread_ratio={spread} has no effect with one replica: training continues as "
            "OneCycleLR. Start several with torchrun, and initialise the process group first",
        )
        plan = Plan(
            optimizer=optimizer, model=model, interval=model_sync_interval,
            total_steps=max(0, total_steps_of(given)) or None, probe=probe, adapt=Adapt(), copies=Copies(),
            faults=faults, process_group=process_group, members=members,
        )  # fmt: skip
        check_warmup(given, knobs_adapt=any(knob.adapt for knob in ensemble.knobs))
        check_last_epoch(last_epoch, optimizer, cycle_momentum)
        refuse_second(optimizer)
        if cycle_momentum and any(type(knob) is Momentum for knob in ensemble.knobs):
            raise ValueError("knobs must not contain Momentum while the schedule moves it; pass cycle_momentum=False")
        members.bind(plan)
        torchs = {name: given[name] for name in _TORCHS}
        facts = {**plan.facts(), **torchs, **{name: given[name] for name in AGREED}}
        del facts["optimizer"], facts["interval"], facts["spread"]
        overwritten = {"lr"} if last_epoch >= 0 else {"lr", *LRS, *MOMENTA}
        overwritten |= {"momentum", "betas[0]"} if cycle_momentum else set()
        replicas = plan.find_replicas(facts, wait=False, overwritten=overwritten)

        self._schedule_lrs: list[float | Tensor] | None = None
        self._decay = Decay()
        before = [dict(group) for group in optimizer.param_groups]
        try:
            super().__init__(**torchs)
        except Exception:
            # torch checks some arguments after it has begun to write others into the groups.
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group.clear()
                group.update(values)
            raise
        run = plan.make_run(
            replicas, step=self.last_epoch,
            controller=PaperController(loss_scale, lr_of_lr, momentum_of_lr) if enable_auto_lr else None,
            acting=(auto_lr_warmup_steps, math.inf), groups="each", rollback=False, anchor="round",
        )  # fmt: skip
        # One replica with a spread trains as OneCycleLR, whatever was asked of the auto-LR it cannot have.
        kind = "schedule" if replicas.count == 1 and spread > 0 else decay
        self._decay = Decay(kind, auto_lr_warmup_steps, div_factor / final_div_factor)
        self._schedule: OneCycle = OneCycle(self)
        self._attach(optimizer, run)
        self._refresh()

    # -- the schedule -------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float | Tensor]:
        """This replica's learning rate of each param group: schedule x learned scale x multiplier. A pure read."""
        if not self._get_lr_called_within_step:  # as torch does
            message = "To get the last learning rate computed by the scheduler, please use `get_last_lr()`."
            warnings.warn(message, UserWarning, stacklevel=2)
        lrs = self._torch_lrs(self.last_epoch) if self._schedule_lrs is None else self._schedule_lrs
        return list(lrs) if self._run is None else self._run.lrs.scaled(lrs)

    def _initial_step(self) -> None:
        """Torch's first step, when it constructs the schedule and when SequentialLR begins with it."""
        self._step_count = 0
        self._advance()

    def _old_step(self) -> None:
        """Torch's own step, where it does not call :meth:`_update_lr`."""
        OneCycleLR.step(self)
        self._update_lr(self.last_epoch)

    _advance = OneCycleLR.step if _HAS_UPDATE_LR else _old_step

    def _update_lr(self, epoch: int | None = None) -> None:
        """Take the schedule to a step, the next one by default, and write the learning rates."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self._run is None:
            self._schedule_lrs = self._own_lrs()
            groups = self.optimizer.param_groups
            self._last_lr = [write_lr(group, lr) for group, lr in zip(groups, self._schedule_lrs, strict=True)]
            return
        decay = self._decay
        if self._run.lrs.joined or decay.kind != "schedule":
            with self._scheduled_groups() as groups:
                lrs = self._own_lrs()
                if decay.kind != "schedule" and self.last_epoch > decay.begins(self):
                    lrs = decay.lrs(self, groups, self._torch_lrs(decay.begins(self)))
            follow_momentum(self, self.optimizer.param_groups, len(groups))
        else:
            lrs = self._own_lrs()
        self._schedule_lrs = lrs
        self._schedule.lrs = lrs
        self._write_lrs(lrs)

    def _scheduled_groups(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """The optimizer with the param groups that the schedule knows: torch's have no place for more."""
        groups = self.optimizer.param_groups
        if self._run is not None:
            lrs = self._run.lrs
            num_known = len(lrs.knob_of_group) - len(lrs.joined)
            if num_known < len(groups):
                return with_groups(self.optimizer, groups[:num_known])
        return nullcontext(groups)

    def _own_lrs(self) -> list[float | Tensor]:
        """What OneCycleLR gives now; it writes the momentum too, where it cycles that."""
        before, self._get_lr_called_within_step = self._get_lr_called_within_step, True
        try:
            return OneCycleLR.get_lr(self)
        finally:
            self._get_lr_called_within_step = before

    def _torch_lrs(self, step: float) -> list[float | Tensor]:
        """OneCycleLR's learning rates at ``step``, with the momentum left alone."""
        kept = self.cycle_momentum, self.last_epoch
        self.__dict__.update(cycle_momentum=False, last_epoch=step)
        try:
            with self._scheduled_groups():
                return self._own_lrs()
        finally:
            self.cycle_momentum, self.last_epoch = kept

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer."""
        self._update_lr(self.last_epoch)

    # -- training -----------------------------------------------------------------------------------------------

    def _look_closer(self, step: int) -> None:
        if step > self.total_steps:
            self._advance()  # raises
        self._take_up_new_groups()
        if self._run.active and self._schedule_lrs is not None:  # else it is OneCycleLR, which overwrites all
            self._refuse_foreign_lr(wait=self._run.policy.is_due(step))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types, the same on every rank: save it on one, load it on all.

        To be saved together with the model right after a converge, after :meth:`converge`, or inside
        :meth:`converged`; in between, the model on this rank is one of several different replicas, and this warns.
        """
        self._take_up_new_groups()
        self._warn_if_apart()
        with self._run.lock:
            return {
                "version": STATE_VERSION,
                **save_schedule(self),
                "rounds": self._run.state_dict(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write the learning rates into the optimizer.

        The schedule comes from the state, as in torch; HDET's own arguments stay those of the constructor. A state of
        torch's OneCycleLR is accepted too. Another number of replicas gets a new spread around the same base values.
        A state that cannot be used raises ValueError and changes nothing.
        """
        of_torch = is_torchs_own(state_dict)
        if of_torch:
            state_dict = from_torch(self, state_dict)
        check_version(state_dict, "OneCycleAutoLR")
        self._take_up_new_groups()
        with self._run.lock:
            self._load(state_dict, of_torch=of_torch)

    def _load(self, state_dict: Mapping[str, Any], *, of_torch: bool) -> None:
        run, before = self._run, remember(self)
        try:
            load_schedule(self, state_dict)
            groups = self.optimizer.param_groups
            self._check_schedule(groups if of_torch else groups[: run.lrs.num_scheduled(state_dict["rounds"])])
            if not of_torch:
                run.load_state_dict(state_dict["rounds"], step=self.last_epoch)
        except Exception as error:
            self.__dict__.update(before)
            raise cannot_load(error) from error
        self._schedule_lrs = None
        self._schedule.follow()
        if self.last_epoch >= 0:  # inside SequentialLR, before its turn, a schedule is at -1
            self._refresh()

    def _check_schedule(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise where a loaded schedule does not fit these param groups or cannot be computed."""
        check_one_cycle_state(self, groups)
        if self._decay.kind != "schedule" and (begins := self._decay.begins(self)) >= self.total_steps:
            raise ValueError(f"decay sets in at step {begins}, but the state ends at {self.total_steps}")
        if self.last_epoch >= 0:
            self._torch_lrs(self.last_epoch)


class OneCycle:
    """The OneCycleLR inside a OneCycleAutoLR, as a scheduler asks for it: see :class:`hdet.schedule.Schedule`.

    Args:
        scheduler: which is one itself. It is not kept alive.
    """

    counter = None
    counted = 0
    inside = ()

    def __init__(self, scheduler: OneCycleAutoLR) -> None:
        self._scheduler: OneCycleAutoLR = weakref.proxy(scheduler)
        self.follow()

    def follow(self) -> None:
        """The scheduler has been taken to another step, or has loaded a state."""
        self.total_steps = self.last_step = self._scheduler.total_steps
        self.lrs = self._scheduler._schedule_lrs or []

    @property
    def step(self) -> int:
        step = self._scheduler.last_epoch  # SequentialLR moves it
        if step < 0 and not _HAS_UPDATE_LR:
            raise RuntimeError("OneCycleAutoLR as a later part of SequentialLR needs torch 2.9 or newer; put it first")
        return step

    @property
    def first_lr(self) -> float:
        return float(self.lrs[0]) if self.lrs else 0.0

    def check_untouched(self) -> None:
        pass  # it counts its own steps

    def advance(self, lrs: LearningRates) -> bool:
        self._scheduler._advance()
        return False


class Decay(NamedTuple):
    """Eq. 8: how the base learning rate falls, geometrically, while the paper's controller acts.

    Attributes:
        kind: ``"schedule"`` for OneCycleLR's own; see OneCycleAutoLR.
        warmup_steps: before which it does not set in.
        printed_ratio: what the learning rate is divided by over the run, as Eq. 8 is printed.
    """

    kind: DecayKind = "schedule"
    warmup_steps: int = 0
    printed_ratio: float = 1.0

    def begins(self, schedule: OneCycleLR) -> float:
        """The step from which the base falls geometrically: the end of the warm-up, but not before the peak."""
        peak: float = schedule._schedule_phases[0]["end_step"]
        return max(float(self.warmup_steps), peak, 0.0)

    def lrs(
        self, schedule: OneCycleLR, groups: Sequence[dict[str, Any]], starts: Sequence[float | Tensor]
    ) -> list[float | Tensor]:
        """A constant gamma a round, applied smoothly, so that it holds for any T and any last round.

        ``starts``: what the ``schedule`` gives these param ``groups`` where the decay begins.
        """
        begun = self.begins(schedule)
        progress = (schedule.last_epoch - begun) / (schedule.total_steps - begun)
        lrs = []
        for group, start in zip(groups, starts, strict=True):
            ratio = start / group["min_lr"] if self.kind == "floor" else self.printed_ratio
            lrs.append(start * math.exp(-math.log(ratio) * progress))
        return lrs


# -- its arguments: the rule, the value and, where it helps, the remedy -----------------------------------------------


def check_one_cycle(a: Mapping[str, Any]) -> None:
    """OneCycleAutoLR's own arguments and those of torch, before torch sees them."""
    for name in ("enable_auto_lr", "cycle_momentum", "three_phase"):
        require(is_flag(a[name]), name, "True or False", a[name])
    for name in ("ensemble_lr_spread_ratio", "momentum_of_lr"):
        require(0 <= number(a[name]) < 1, name, "in [0, 1)", a[name])
    for name in ("loss_scale", "div_factor", "final_div_factor"):
        require(number(a[name]) > 0, name, "a finite number > 0", a[name])
    require(number(a["lr_of_lr"]) >= 0, "lr_of_lr", "a finite number >= 0", a["lr_of_lr"])
    for name, low in (("model_sync_interval", 1), ("auto_lr_warmup_steps", 0)):
        require(as_int(a[name]) >= low, name, f"an integer >= {low}", a[name])
    require_one_of("decay", a["decay"], "schedule", "floor", "printed")
    _check_schedule(a)
    if not a["enable_auto_lr"]:
        if a["decay"] != "schedule":
            raise ValueError(
                f"decay={a['decay']!r} is the decay of the auto-LR phase; set enable_auto_lr=True, or leave decay out"
            )
        return
    if a["decay"] == "printed" and a["div_factor"] < a["final_div_factor"]:
        raise ValueError(
            'decay="printed" must not grow the learning rate, but Eq. 8 as printed multiplies it by final_div_factor / '
            f'div_factor = {a["final_div_factor"] / a["div_factor"]:g} over the run; use decay="floor", or '
            "div_factor >= final_div_factor"
        )


def check_warmup(a: Mapping[str, Any], *, knobs_adapt: bool) -> None:
    """Raise where the paper's controller, or that of the knobs, would never act."""
    total = total_steps_of(a)
    acts = "auto-LR" if a["enable_auto_lr"] else "knobs" if knobs_adapt else None
    if acts is not None and a["auto_lr_warmup_steps"] >= total > 0:
        raise ValueError(
            f"auto_lr_warmup_steps must be smaller than the {total} total steps for {acts} to act, but got "
            f"auto_lr_warmup_steps={a['auto_lr_warmup_steps']}; lower it, e.g. to {total // 5}"
        )


def total_steps_of(a: Mapping[str, Any]) -> int:
    """Length of the run; 0 or less where torch will refuse what was given."""
    return int(a["total_steps"] or (a["epochs"] or 0) * (a["steps_per_epoch"] or 0))


def _check_schedule(a: Mapping[str, Any]) -> None:
    """What OneCycleLR does not check, or checks after it has begun to write into the optimizer."""
    for name in ("total_steps", "epochs", "steps_per_epoch"):  # torch says itself where one is not positive
        require(a[name] is None or is_whole(a[name]), name, "None or an integer >= 1", a[name])
    total = total_steps_of(a)
    lrs = _each(a["max_lr"])
    in_range = all(0 <= lr <= MAX_LR for lr in lrs)
    require(in_range, "max_lr", f"numbers in [0, {MAX_LR:g}], one or one a group", a["max_lr"])
    require(not math.isnan(number(a["pct_start"])), "pct_start", "a float in [0, 1]", a["pct_start"])
    require(isinstance(a["anneal_strategy"], str), "anneal_strategy", '"cos" or "linear"', a["anneal_strategy"])
    # OneCycleLR divides by the length of a phase.
    rise = float(a["pct_start"]) * total
    if total > 0 and (rise == 1 or total in (rise, 2 * rise - 1 if a["three_phase"] else rise)):
        raise ValueError(
            f"pct_start must leave each phase of OneCycleLR some length, but got pct_start={a['pct_start']} of {total} "
            "steps; raise or lower it a little"
        )
    if a["cycle_momentum"]:
        for name in ("base_momentum", "max_momentum"):
            momenta = _each(a[name])
            # Any that torch takes: an optimizer of the user's own may mean something else by it.
            require(not any(map(math.isnan, momenta)), name, "finite numbers, one or one a group", a[name])
    firsts = [lr / float(a["div_factor"]) for lr in lrs]
    if any(lr > MAX_LR for lr in (*firsts, *(lr / float(a["final_div_factor"]) for lr in firsts))):
        raise ValueError(
            f"div_factor and final_div_factor must keep learning rates below {MAX_LR:g}, but got "
            f"div_factor={a['div_factor']!r} and final_div_factor={a['final_div_factor']!r}"
        )
    if a["decay"] == "floor" and any(lr / float(a["final_div_factor"]) == 0 for lr in firsts):
        raise ValueError(
            'decay="floor" needs a schedule that ends above 0, but got '
            f"final_div_factor={a['final_div_factor']!r} and max_lr={shown(a['max_lr'])}"
        )
    last = as_int(a["last_epoch"])
    fine = last == -1 or 0 <= last < max(total, 1)
    require(fine, "last_epoch", "-1, or a step before the last", a["last_epoch"])


def _each(value: Any) -> list[float]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [number(v.item() if isinstance(v, Tensor) and v.numel() == 1 else v) for v in values]


def check_last_epoch(last_epoch: int, optimizer: Optimizer, cycle_momentum: bool) -> None:
    """A schedule that goes on needs what it wrote into the optimizer's groups when it began."""
    needed = {"initial_lr", "max_lr", "min_lr", *(("base_momentum", "max_momentum") if cycle_momentum else ())}
    missing = sorted({name for group in optimizer.param_groups for name in needed - set(group)})
    if last_epoch >= 0 and missing and "initial_lr" not in missing:  # without that, torch says so itself
        raise ValueError(
            f"last_epoch must be -1 for an optimizer that no OneCycleLR has set up, but got last_epoch={last_epoch}, "
            f"and its param groups have no {missing}; load the optimizer's state first"
        )


# -- its schedule as a saved state in plain types, and torch's own form of it -----------------------------------------

_KEYS = ("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "base_lrs")


def is_torchs_own(state: Any) -> bool:
    """Whether a state is that of a OneCycleLR without hdet."""
    return isinstance(state, Mapping) and "version" not in state and "total_steps" in state


def save_schedule(schedule: OneCycleLR) -> dict[str, Any]:
    """The inverse of :func:`load_schedule`."""
    return {
        "last_epoch": schedule.last_epoch,
        "step_count": schedule._step_count,
        "schedule": {key: _plain(getattr(schedule, key)) for key in _KEYS if hasattr(schedule, key)},
    }


def from_torch(schedule: OneCycleLR, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of torch's OneCycleLR in our form. As in torch, what it does not have stays as it is."""
    state = {**vars(schedule), **state}
    return {
        **{key: state[key] for key in ("last_epoch", "anneal_func") if key in state},
        "version": STATE_VERSION,
        "step_count": state["_step_count"],
        "schedule": {key: state[key] for key in _KEYS if key in state},
        "rounds": None,
    }


def remember(schedule: OneCycleLR) -> dict[str, Any]:
    """The attributes that :func:`load_schedule` changes."""
    keys = (*_KEYS, "last_epoch", "_step_count")
    return {key: getattr(schedule, key) for key in keys if hasattr(schedule, key)}


def load_schedule(schedule: OneCycleLR, state: Mapping[str, Any]) -> None:
    """Write a state into the schedule's attributes, as they come; nothing is checked but that they are there."""
    schedule.last_epoch, schedule._step_count = state["last_epoch"], state["step_count"]
    saved = {**mapping_of(state["schedule"], "schedule")}
    if "_anneal_func_type" not in saved and "anneal_func" in state:
        old = getattr(state["anneal_func"], "__name__", "")
        saved["_anneal_func_type"] = getattr(schedule, "_anneal_func_type", old.removeprefix("_annealing_"))
    schedule.__dict__.update({key: copy.deepcopy(saved[key]) for key in _KEYS})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return dict(value) if isinstance(value, Mapping) else value
