"""AutoLR for one model, slow and in one file: read it from top to bottom to learn the method.

It is used like ``hdet.AutoLR(optimizer, total_steps=N)``, and tests hold the two equal. A learning rate is schedule x
warm-up x level x scale: the *level* follows from the size of the first updates (Eq. 16), the *scale* moves after each
round of T steps by what rounds have shown (Eq. 17). Broken rounds are undone. Left out: schedules of the user's own,
runs of unknown length, replicas, checkpoints, buffers in a rollback, a limit on rollbacks, weights that never move; and
models above ten million parameters, of which the library samples a share.
"""

from __future__ import annotations

import copy
import math
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class AutoLR:
    """What is measured in a step, and what happens at the end of a round."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int) -> None:
        self.optimizer, self.total_steps, self.num_steps = optimizer, total_steps, 0
        self.parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        # The learning rates that were given say how param groups compare, and nothing else.
        self.ratios = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]
        self.interval, self.warm_steps = min(max(total_steps // 100, 4), 50), min(max(int(0.06 * total_steps), 1), 500)
        self.hold_from = 0.7 * total_steps  # the decay begins, and the scale holds still
        self.share = min(math.sqrt(max(200 / total_steps, 1.0)), 2.0)  # a step of a short run does more
        self.level, self.sizes, self.most = 1e-12, list[float](), 6.0  # the first step moves next to nothing
        self.usual, self.shrinks = math.inf, 1.0  # where progress alone leads to; whether updates are not of one size
        self.searching, self.scale, self.fallen = True, 1.0, 0.0  # while searching for the level, a step is a round
        self.losses, self.samples, self.first_losses = list[float](), list[float](), list[float]()  # of steps
        self.rounds: list[tuple[float, float, float]] = []  # slope, its variance, and loss of each since the anchor
        self.num_forgotten = 0  # of these, the slopes do not count any more: a round was undone since
        self.guard, self.anchor = Guard(self.interval), self.theta()
        self.proven = self.last = self.theta_and_state()
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        self.write_lrs()

    def write_lrs(self) -> None:
        """Up to the level along a line, once it is known; constant; down to zero along a line."""
        schedule = min(1.0, (self.total_steps - self.num_steps) / (0.3 * self.total_steps))
        warmup = min((self.num_steps + 1) / self.warm_steps, 1.0) if self.sizes else 1.0
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = ratio * schedule * warmup * self.level * self.scale

    def before_step(self) -> None:
        """Sample the slope: gradients are in place, and the weights have not moved."""
        self.before, self.gradient = self.theta(), parameters_to_vector([p.grad for p in self.parameters])
        # With a learning rate h times as high since the anchor A, the weights would be at A + h (theta - A), to first
        # order. So <g, theta - A> is the derivative of the loss over log h at h = 1: positive, a lower one was better.
        self.samples.append(float(self.gradient @ (self.before - self.anchor)))

    def step(self, loss: Tensor) -> None:
        """After each step of the optimizer."""
        self.losses.append(loss.item())
        self.num_steps += 1
        if self.searching or self.num_steps % self.interval == 0 or self.num_steps == self.total_steps:
            self.end_round(fmean(self.losses))
            self.losses, self.samples = [], []
        self.write_lrs()

    def end_round(self, loss: float) -> None:
        """Measure the level; undo the round, or move the scale."""
        step, searching, warm_until = self.num_steps, self.searching, max(self.warm_steps, 4)
        update = self.theta() - self.before  # of the last step
        if step - len(self.losses) < warm_until:
            self.measure_level(update)
        self.searching = not self.sizes or step < 4
        if not searching and self.guard.is_broken(loss if update.isfinite().all() else math.nan):
            self.restore()
            self.scale, self.num_forgotten = 0.5 * self.scale, len(self.rounds)
        elif not searching:
            if self.guard.num_in_vain:  # the data have changed: the rate was not the cause, and the path begins here
                self.scale, self.fallen = 2.0**self.guard.num_in_vain * self.scale, 2.0
            elif step <= self.hold_from:
                may = allowance(float(self.before.norm()), len(update), self.most, 0.3)
                size = float(update.norm() / self.before.norm()) / self.share / may
                self.adapt(loss, size, min(may / 3, 1.0), in_warmup=step < warm_until)
            if self.fallen >= 2:
                self.anchor, self.rounds, self.num_forgotten, self.fallen = self.theta(), [], 0, 0.0
            if not self.guard.num_lost:  # a round in doubt is never returned to
                self.proven, self.last = self.last, self.theta_and_state()
        self.first_losses = [*self.first_losses, loss][:4]
        if step == 4:  # the loss before training, and how far those of batches are apart
            self.start = fmean(self.first_losses)
            self.noise = max(stdev(self.first_losses), 1e-3 * abs(self.start))
            self.guard.expect(self.start, 2 * self.noise)  # four losses know their own noise badly

    def measure_level(self, update: Tensor) -> None:
        """Eq. 16: level x (largest + 2 last) = delta |theta|. Adam's updates shrink, those of momentum grow."""
        size = max(float(self.before.norm()), 1e-3 * (root := math.sqrt(len(update))))  # zeros have none of their own
        if update.norm() > 1e-6 * size:  # less is lost in rounding
            self.sizes.append(last := float(update.norm()) / self.optimizer.param_groups[0]["lr"])
            is_sign, largest = 0.3 <= self.sizes[0] / root <= 1.05, max(self.sizes)  # Adam's begin as signs
            low, high = (0.95, 0.99) if is_sign else (0.75, 0.9)
            steady = clip((min(self.sizes) / largest - low) / (high - low))  # as Lion's, which never become smaller
            if len(self.sizes) == 1 and 0.3 <= last / float(self.gradient.norm()) <= 8:  # SGD's, which batches change
                self.most = 6.0 if is_sign else 2.0
            may = allowance(size, len(update), self.most)
            if "muon" in type(self.optimizer).__name__.lower():  # whose best rate is no lower in large models
                may = max(may, min(allowance(size, len(update), self.most, 1.0), 1.0))
            self.shrinks, delta = 1 - steady, 0.02 * self.share * may / 2.5**steady
            self.level = delta * size / (largest + 2 * last)
            if self.most > 2:  # the best rates of models, by their size
                best = math.pow(size / root / 0.06, -0.87) * max(math.pow(len(update) / 3e6, -0.55), 1.0)
                self.usual = (
                    1.6 * 0.02 * self.share * best * size / min(largest, root) / (13 if is_sign else 8) ** steady
                )
        elif not self.sizes:  # aim at 1e-4, with an update like a sign or like SGD's, first the larger of them
            aims = sorted([1e-4 * size / root, 1e-4 * size / float(self.gradient.norm())])
            safe = max(1e4 * self.level, aims[0])  # what could not be measured was below a millionth of the weights
            self.level = min(next((aim for aim in aims if aim > self.level), 100 * self.level), safe)

    def adapt(self, loss: float, update: float, ease: float, *, in_warmup: bool) -> None:
        """Eq. 17: the scale rises where the slope supports it or progress has earned it, and falls where neither."""
        step, num, done = self.num_steps, len(self.losses), self.num_steps / self.hold_from
        b, z = self.smoothed_slope(loss)
        fall, fall_error = self.start - loss, self.noise * math.sqrt(1 / 4 + 1 / num)  # P, since the first step
        e = elasticity(b, fall, fall_error)
        progress, cost, most, late_slope, late_z, jump = look_back(self.rounds)
        dtau = min(math.log(step / max(step - num, 1)), 0.7)  # moves go by the logarithm of the time
        # Optimism, earned by progress: the decay will remove noise, so z up to z0 or, later, a small cost is no brake.
        z0, late = 2.5 - 1.5 * done, clip((done - 0.2) / 0.3) * clip((0.3 - cost) / 0.2)
        # Adam may remember large first gradients: doublings of an update to 0.5%, at ease if more is surely better.
        small = math.log2(0.005 / max(update * ease ** clip(-20 * most), 1e-300)) * (fall > 10 * fall_error)
        certain = self.shrinks * clip(-z / 10 - 1) * clip((done - 0.2) / 0.3)  # and late, as in linear models
        asked = certain * clip(most / -0.3)
        rise = clip((progress - 3) / 7) * 1.5 * max(min(small / 2, 3.0), 3**asked) * dtau
        rise *= max(clip((z0 - z) / z0), late, clip(small - 1))
        ceiling = self.usual / self.level / self.scale * max(0.0025 / max(update, 1e-300), 1.0)
        further = min(math.sqrt(max(len(self.anchor) / 3e6, 1.0)), 2.0)  # large models, where noise costs nothing
        ceiling *= 4**asked * further ** clip(1 - 20 * most)
        rise = min(rise, math.log(max(ceiling, 1.0)))
        supported = z < -2 and e < 0
        if supported and (z < -4 or progress >= 3):
            rise += 2 * dtau * math.log((1 + e / 2) / (1 + e))  # how many times too short the path is, on a parabola
            if e < -0.8:  # the loss is linear along the whole path: nothing limits the rate yet
                rise = max(rise, 0.3 * clip((-z - 4) / 6))
        if e >= -0.8:  # not beyond updates of 0.5% of the weights early, 0.8% late: damage of the first steps stays
            bound = 0.005 * 4**asked * 1.6 ** clip((done - 0.1) / 0.6) / ease ** clip(2 - 20 * most)  # or surely cheap
            rise *= clip((bound - update) / (0.3 * bound))
        dear = clip((cost - 0.3) / 0.3)
        move = 0.0 if in_warmup or jump > 2 else min((1 - dear) * rise, 0.3)
        if not in_warmup:  # the decay begins early, along a line to the end, where noise costs much of the gain
            left = self.total_steps - step
            move += dear * clip((done - 0.2) / 0.3) * math.log(left / (left + num))
        rises = progress < -3  # a loss that stands still takes back what was earned, unless the slope leans to more
        if progress < 1 and (rises or late_z >= -0.5) and not (supported or in_warmup) and self.scale > 0.03**rises:
            move = min(move, -0.1 * min(1 - progress, 1.0))
        e = max(e if z > 4 else 0.0, elasticity(late_slope, fall, fall_error) if late_z > 2 else 0.0)
        if e > 0.25:  # the path is too long, since the anchor or of late
            move = min(move, -min(2 * dtau * math.log((1 + e) / (1 + e / 2)), 0.2))
        move = min(move, -min(2 * dtau * clip(least - 2), 0.2)) if (least := 2 * cost - most) > 2 else move  # surely
        self.scale *= math.exp(move)
        self.fallen = max(self.fallen - move, 0.0)  # what an overshoot has displaced stays: renew the anchor some time

    def smoothed_slope(self, loss: float) -> tuple[float, float]:
        """The mean of the rounds' slopes, of which each counts half of the next; and the same in standard errors."""
        slope, (usual, usual_variance) = fmean(self.samples), smoothed(self.rounds[self.num_forgotten :])
        if len(self.samples) == 1:  # cannot tell its own error; how far it is from those before can
            variance = (slope - usual) ** 2
        elif (variance := stdev(self.samples) ** 2 / len(self.samples)) > (bound := 9 * usual_variance) > 0:
            slope, variance = usual + (slope - usual) * math.sqrt(bound / variance), bound  # an outlier
        self.rounds.append((slope, variance, loss))
        b, variance = smoothed(self.rounds[self.num_forgotten :])
        return b, b / math.sqrt(variance / 3)  # weighted so, rounds have a third of one round's variance

    def theta(self) -> Tensor:
        return parameters_to_vector(self.parameters).detach()

    def theta_and_state(self) -> tuple[Tensor, dict[str, Any]]:
        return self.theta(), copy.deepcopy(self.optimizer.state_dict()["state"])

    def restore(self) -> None:
        """Go back to where the last healthy round has *started*: its last steps may have broken the model."""
        self.last = self.proven
        vector_to_parameters(self.proven[0].clone(), self.parameters)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": copy.deepcopy(self.proven[1])})


def allowance(size: float, num: int, most: float, least: float = 0.0) -> float:
    """What a step may do: less in models that are large, or have large weights, 1 at 3M entries of 0.06."""
    by_size = math.pow(num / 3e6, -0.8 if num > 3e6 else -0.4)  # the best rate falls about as a model's width grows
    return min(max(math.pow(max(size / math.sqrt(num), 1e-3) / 0.06, -0.75) * max(by_size, least), 1 / 3), most)


def smoothed(rounds: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Means of slope and variance, in which each round counts half of the next."""
    weights = [0.5**age for age in range(len(rounds))][::-1]
    slope, variance = (sum(w * row[i] for w, row in zip(weights, rounds, strict=True)) for i in (0, 1))
    return slope / max(sum(weights), 1.0), variance / max(sum(weights), 1.0)


def look_back(rounds: list[tuple[float, float, float]]) -> tuple[float, float, float, float, float, float]:
    """Since the anchor: progress q, cost over gain, plus two errors, late slope, its z, and the last loss's jump."""
    stride = 2 ** (len(rounds) // 128).bit_length()  # rounds of a row: there are never more than 127 rows
    if (num := len(rounds) // stride) < 8:
        return 2.0, 0.0, math.inf, 0.0, 0.0, 0.0  # neither progress nor a standstill
    slopes, _, losses = torch.tensor(rounds[: num * stride], dtype=torch.float64).view(num, stride, 3).mean(1).T
    # A batch of outliers is no rise of the loss: no row counts as more than some five deviations above those around it.
    usual = losses.unfold(0, 5, 1).median(1).values[(torch.arange(num) - 2).clamp(0, num - 5)]
    bends = losses[num // 2 :].diff(2).abs()
    losses = losses.minimum(usual + 3 * (1 + 4 / len(bends)) * bends.quantile(0.5))
    half, late, slopes = losses[int(0.375 * num) : num // 2], losses[int(0.75 * num) :], slopes[int(0.75 * num) :]
    bends = losses[num // 2 :].diff(2).square() / 6  # noise is what no trend explains of three; few tell little
    deviation = float(bends.mean().sqrt()) * (1 + 2 / len(bends))
    drop, noise = float(half.mean() - late.mean()), deviation * math.sqrt(1 / len(late) + 1 / len(half))
    slope, error = float(slopes.mean()), math.sqrt(slopes.diff().square().mean() / 2 / len(slopes))
    gain = max(drop, noise) / math.log(2)  # of an e-fold time; from the third eighth to the last quarter it doubles
    cost, most = slope / gain, (slope + 2 * error) / gain
    return drop / noise, cost, most, slope, slope / error, float(losses[-1] - losses[-2]) / (math.sqrt(2) * deviation)


def elasticity(slope: float, fall: float, error: float) -> float:
    """E = b / P: -1 if the loss is linear along the path, 0 if a longer one gains nothing, more if it costs."""
    if slope < 0:  # where P is lost in noise, a line is not excluded
        return max(slope / max(fall - 2 * error, -slope), -0.98)
    return min(slope / max(fall, error), 10.0)


def clip(share: float) -> float:  # noqa: D103
    return min(max(share, 0.0), 1.0)


class Guard:
    """Tells a broken round by its loss, which stays up for 16 steps: outliers and momentum carry it up for less."""

    def __init__(self, interval: int) -> None:
        self.max_lost, self.num_in_vain, self.jump = max(math.ceil(16 / interval), 2), 0, 0.0

    def expect(self, first: float, noise: float, *recent: float) -> None:
        """Begin: the loss before training, how far batches are apart, and losses of rounds since."""
        self.first, self.noise, self.recent, self.lowest = first, noise, list(recent), math.inf
        self.num_lost = self.num_strikes = 0

    def is_broken(self, loss: float) -> bool:
        progress, self.num_in_vain = self.first - self.lowest, 0
        is_lost = progress > 10 * self.noise and loss > self.first - 0.1 * progress
        is_up = is_lost or (bool(self.recent) and loss > self.limit())
        broken = not math.isfinite(loss) or (is_up and self.num_lost + 1 >= self.max_lost)
        if broken:
            self.num_strikes += 1
        elif is_up:
            self.num_lost += 1
        else:
            self.num_strikes = self.num_lost = 0
            self.recent = [*self.recent, loss][-16:]
            self.lowest = min(self.lowest, median(self.recent[-5:])) if len(self.recent) > 1 else math.inf
        if self.num_strikes > 3 and math.isfinite(loss):  # going back does not help: the data have changed
            if loss - self.recent[-1] > 0.8 * (self.jump - self.recent[-1]):  # no better at half the rate
                self.num_in_vain = self.num_strikes - 1
            self.expect(loss, math.nan, loss)
        self.jump = loss
        return broken and self.num_strikes > 0

    def limit(self) -> float:
        """A loss above has jumped."""
        usual, lowest = median(self.recent[-5:]), min(self.recent)
        size = max(abs(usual), abs(self.first))
        if len(self.recent) < 5:  # too few to know what is usual
            room = max(0.35 * (self.first - lowest), 2.5 * self.noise)
            return usual + 2 * size if math.isnan(self.noise) else lowest + room
        steps = [b - a for a, b in zip(self.recent, self.recent[1:], strict=False)]
        sigma = stdev(steps, median(steps))  # around the trend: a loss that falls fast must not hide one that jumps
        return usual + max(0.1 * (self.first - usual), 5 * (1 + 4 / len(steps)) * sigma, 1e-3 * size)
