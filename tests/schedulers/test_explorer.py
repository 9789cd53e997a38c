"""Explorer on real processes: knobs are dealt, compared, moved and put back; runs resume; errors reach everyone."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from hdet import AutoLR, Averaging, Ensemble, Explorer, OneCycleAutoLR, knobs
from hdet.controllers import Evidence
from hdet.ensemble.controllers import JointController
from hdet.ensemble.explorer import LR_OPTIMISM
from hdet.policy.spread import assign
from hdet.replication import state_tensors
from job import OnDemand, Training, error, everyone, launch, world
from options import grouped, with_ensemble
from tiers import slow

TOTAL_STEPS, INTERVAL, LR, DECAY, BETA = 18, 4, 0.02, 0.05, 0.9


class _Net(nn.Module):
    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first, self.dropout, self.last = nn.Linear(3, 6), nn.Dropout(0.1), nn.Linear(6, 1)
        self.temperature: float | Tensor
        if buffer:
            self.register_buffer("temperature", torch.tensor(1.0))
        else:
            self.temperature = 1.0
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.temperature * self.first(x))
        out: Tensor = self.last(self.dropout(hidden))
        return out


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 3, generator=g, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(24, 1, generator=g, dtype=torch.float64)


MAKE_KNOB: dict[str, Callable[[_Net], Any]] = {
    "learning_rate": lambda net: knobs.LearningRate(),
    "weight_decay": lambda net: knobs.WeightDecay(),
    "temperature": lambda net: knobs.Temperature(net, "temperature"),
    "dropout": lambda net: knobs.Dropout(net),
    "momentum": lambda net: knobs.Momentum(),
}


class _Run(Training):
    """A small regression, all of it a function of the step and the rank."""

    def __init__(
        self,
        names: tuple[str, ...] = ("weight_decay", "temperature", "dropout"),
        *,
        adam: bool = True,
        probe: bool = True,
        face: str = "explorer",
        buffer: bool = False,
        broadcast: bool = True,
        wrapped: bool = False,
        adapt: bool = True,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        self.rank, self.count = world()
        self.net = _Net(buffer=buffer)
        self.model: nn.Module = self.net
        if self.count > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the option has another name in newer versions
                options_of_ddp: dict[str, Any] = {} if broadcast else {"broadcast_buffers": False}
                self.model = DistributedDataParallel(self.net, **options_of_ddp)
        if wrapped:
            self.model = nn.Sequential(self.model)
        parameters = self.net.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, betas=(BETA, 0.99))
            if adam
            else torch.optim.SGD(parameters, lr=LR, momentum=momentum)
        )
        self.bad_probe = False
        self.names = names
        own = [MAKE_KNOB[name](self.net) for name in names]
        if not adapt:
            for knob in own:
                knob.adapt = False
        common: dict[str, Any] = {"knobs": own, "probe": self.probe if probe else None, "model": self.model, **options}
        self.scheduler: Any
        if face == "auto":
            schedule = CosineAnnealingLR(self.optimizer, TOTAL_STEPS)
            common |= {"interval": INTERVAL, "start_steps": 0, "level": False}
            self.scheduler = AutoLR(schedule, **with_ensemble(**common))
        elif face == "one cycle":
            self.scheduler = OneCycleAutoLR(
                self.optimizer, LR, TOTAL_STEPS, model_sync_interval=INTERVAL, cycle_momentum=False,
                auto_lr_warmup_steps=0, **with_ensemble(**common),
            )  # fmt: skip
        else:
            model = common.pop("model")
            common = {"interval": INTERVAL, "total_steps": TOTAL_STEPS, **common}
            self.scheduler = Explorer(model, self.optimizer, **grouped(**common))

    def probe(self) -> Tensor:
        if self.bad_probe:
            return torch.tensor(math.nan)
        x, y = _batch(10_000)
        return nn.functional.mse_loss(self.net(x), y)

    def loss(self) -> Tensor:
        torch.manual_seed(100 * self.scheduler.last_epoch + self.rank)
        x, y = _batch(self.scheduler.last_epoch)
        mine = slice(self.rank, None, self.count)
        return nn.functional.mse_loss(self.model(x[mine]), y[mine])

    def row(self) -> tuple[Any, ...]:
        return self.scheduler.last_epoch, self.values(), self.weights()

    def values(self) -> list[float]:
        group = self.optimizer.param_groups[0]
        found = {
            "learning_rate": group["lr"],
            "weight_decay": group["weight_decay"],
            "temperature": float(self.net.temperature),
            "dropout": self.net.dropout.p,
            "momentum": group["betas"][0] if "betas" in group else group["momentum"],
        }
        return [float(found[name]) for name in self.names]

    def own_values(self, rank: int | None) -> list[float]:
        """What the knobs beside the learning rate ought to be on a replica; None for their base."""
        loop = self.scheduler._run
        positions = loop.steering.positions(rank).tolist()
        return [knob.value_at(place) for knob, place in zip(loop.replication.knobs, positions, strict=True)]

    def states(self) -> tuple[Any, Any, Any]:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()))

    def load(self, saved: Any, *, scheduler_first: bool = False) -> None:
        model, optimizer, scheduler = torch.load(saved, weights_only=True)
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)


Cases = dict[str, Callable[..., Any]]


def _run_all(cases: Cases, *args: Any) -> dict[str, Any]:
    """Of several in one set of processes; an error is told instead of a result."""
    warnings.simplefilter("error")
    out: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            out[name] = case(*args)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def _fine(result: Any) -> Any:
    assert not isinstance(result, str), result
    return result


# -- the end, the middle, the mean ----------------------------------------------------------------------------------

ENDS: dict[str, dict[str, Any]] = {
    "local": {"gradients": "local"},
    "local, fittest": {"gradients": "local", "outer": "fittest"},
    "local, nesterov": {"gradients": "local", "outer": "nesterov"},
    "shared": {"names": ("temperature", "momentum"), "probe": False},
    "with learning rate": {"names": ("learning_rate", "weight_decay", "temperature"), "gradients": "shared"},
    "learning rate alone": {"names": ("learning_rate",), "gradients": "local", "probe": False},
    "permutation": {"gradients": "local", "assignment": "permutation"},
    "auto": {"face": "auto", "names": ("weight_decay", "temperature")},
    "one cycle": {"face": "one cycle", "names": ("weight_decay", "temperature"), "ensemble_lr_spread_ratio": 0.1},
}


def cases(chosen: list[tuple[int, str]], name: str = "name") -> pytest.MarkDecorator:
    """Two replicas show what there is to show; that four do the same is seldom news."""
    return pytest.mark.parametrize(("count", name), [slow(*case, when=case[0] > 2) for case in chosen])


END_CASES = [
    *((2, name) for name in ENDS),
    *((4, name) for name in ("local", "shared", "with learning rate", "permutation")),
]


def _end(name: str) -> dict[str, Any]:
    run = _Run(**ENDS[name])
    out: dict[str, Any] = {"start": run.values()}
    run.advance(6)
    out["apart"] = run.values(), run.weights()
    with run.scheduler.converged():
        out["inside"] = run.values(), run.weights()
        out["base"] = run.own_values(None)
        out["inside scale"] = run.scheduler._run.steering.scales[0]
        with run.scheduler.converged():
            out["nested"] = run.values(), run.weights()
    out["again"] = run.values(), run.weights()
    run.advance(TOTAL_STEPS)
    out["end"] = run.values(), run.weights()
    out["end base"] = run.own_values(None)
    out["history"] = run.told()
    if name in ("auto", "one cycle"):
        return out
    other = _Run(**{**ENDS[name], "total_steps": None})
    other.advance(10)
    out["before finish"] = other.values()
    other.scheduler.finish()
    other.scheduler.finish()
    out["finished"] = other.values(), other.weights()
    out["finished base"] = other.own_values(None)
    out["scale"] = other.scheduler._run.steering.scales[0]
    out["end scale"] = run.scheduler._run.steering.scales[0]
    out["after finish"] = error(other.step)
    return out


def _ends() -> dict[str, Any]:
    chosen = [name for count, name in END_CASES if count == world()[1]]
    return _run_all({name: lambda name=name: _end(name) for name in chosen})


@pytest.fixture(scope="module")
def ends() -> dict[int, list[dict[str, Any]]]:
    return OnDemand(lambda n: launch(_ends, n, timeout_s=150))


@cases(END_CASES)
def test_at_the_end_weights_are_equal_and_knobs_at_their_base(
    ends: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    results = [_fine(result[name]) for result in ends[count]]
    beside = [i for i, knob in enumerate(ENDS[name].get("names", ("",) * 3)) if knob != "learning_rate"]
    for key in ("end", "finished"):
        if key not in results[0]:
            continue
        for result in results:
            assert [result[key][0][i] for i in beside] == result[f"{key} base"]
            assert result[key] == results[0][key]
    assert results[0]["end base"] != [results[0]["start"][i] for i in beside] or not beside  # something was learned
    if "finished" in results[0]:
        assert results[0]["after finish"].startswith(
            "RuntimeError: training was finished at step 10; make a new Explor"
        )
        assert len({str(result["before finish"]) for result in results}) > 1


@cases([(2, "with learning rate"), (4, "with learning rate"), (2, "learning rate alone")])
def test_at_the_end_the_learning_rate_is_at_its_base_too(
    ends: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    for result in ends[count]:
        assert _fine(result[name])["finished"][0][0] == pytest.approx(LR * result[name]["scale"], rel=1e-12)
        assert result[name]["end"][0][0] == pytest.approx(LR * result[name]["end scale"], rel=1e-12)


@cases(END_CASES)
def test_inside_converged_weights_are_the_mean_and_knobs_at_base_and_afterwards_all_is_as_before(
    ends: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    results = [_fine(result[name]) for result in ends[count]]
    beside = [i for i, knob in enumerate(ENDS[name].get("names", ("",) * 3)) if knob != "learning_rate"]
    mean = np.mean([result["apart"][1] for result in results], axis=0)
    assert len({str(result["apart"]) for result in results}) == count
    for result in results:
        assert_allclose(result["inside"][1], mean, rtol=1e-12)
        assert result["inside"][1] == results[0]["inside"][1]
        assert [result["inside"][0][i] for i in beside] == result["base"]
        assert result["nested"] == result["inside"]
        assert result["again"] == result["apart"]


@cases([(2, "with learning rate"), (4, "with learning rate"), (2, "learning rate alone")])
def test_inside_converged_the_learning_rate_is_at_its_base_too(
    ends: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    for result in ends[count]:
        found = _fine(result[name])
        assert found["inside"][0][0] == pytest.approx(LR * found["inside scale"], rel=1e-12)


def test_knobs_of_replicas_lie_around_their_base(ends: dict[int, list[dict[str, Any]]]) -> None:
    for name in ("local", "shared"):
        for i, start in enumerate(ends[2][0][name]["base"]):
            values = sorted(result[name]["apart"][0][i] for result in ends[2])
            assert values[0] < start < values[-1]


# -- what is learned, by an oracle ----------------------------------------------------------------------------------


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


# Spread, bounds as positions, and the value at a position.
SCALES: dict[str, tuple[float, float, float, Callable[[float], float]]] = {
    "weight_decay": (0.3, math.log(1e-6 / DECAY), math.log(10 / DECAY), lambda x: DECAY * math.exp(x)),
    "temperature": (0.1, math.log(1e-4), math.log(1e4), math.exp),
    "dropout": (0.1, -0.1 / 0.9, 0.8 / 0.9, lambda x: 0.1 + 0.9 * x),
    "momentum": (0.2, _logit(0.1) - _logit(BETA), _logit(0.999) - _logit(BETA), lambda x: 1 / (1 + math.exp(-x) / 9)),
}


@cases([case for case in END_CASES if case[1] not in ("auto", "one cycle", "learning rate alone")])
def test_history_and_base_values_are_those_of_the_oracle(
    ends: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    histories = [_fine(result[name])["history"] for result in ends[count]]
    assert all(json.dumps(history) == json.dumps(histories[0]) for history in histories)
    names = [n for n in ENDS[name].get("names", ("weight_decay", "temperature", "dropout")) if n != "learning_rate"]
    explores_lr = "learning_rate" in ENDS[name].get("names", ())
    spreads = np.array([0.1 if explores_lr else 0.0, *(SCALES[n][0] for n in names)])
    low, high = (np.array([edge, *(SCALES[n][i] for n in names)]) for i, edge in ((1, -math.inf), (2, math.inf)))
    controller = JointController(optimism=[LR_OPTIMISM] + [0.0] * len(names))
    state, base = controller.init(1 + len(names)), np.zeros(1 + len(names))
    assert [record["step"] for record in histories[0]] == [4, 8, 12, 16, 18]
    for index, record in enumerate(histories[0]):
        places = _places(count, spreads, index, balanced=name != "permutation")
        offsets = spreads[:, None] * places
        inside = np.clip(base[:, None] + offsets, low[:, None], high[:, None]) - base[:, None]
        inside[0] = offsets[0]
        for row, knob in enumerate(names, 1):
            expected = [SCALES[knob][3](base[row] + x) for x in inside[row]]
            assert_allclose(record["knobs"][knob]["values"], expected, rtol=1e-9, atol=1e-12)
        assert_allclose(record["values"][0], LR * math.exp(base[0]) * (1 + inside[0]), rtol=1e-12)
        signal = record["probes"] or record["losses"]
        assert len(signal) == count
        state, decision = controller.update(state, Evidence(np.array(signal), 1 + inside))
        moves = np.log(decision.factors) * [explores_lr, *([1] * len(names))]
        base = np.clip(base + moves, low, high)
        assert_allclose(record["scales"], [math.exp(base[0])], rtol=1e-9)
        for row, knob in enumerate(names, 1):
            seen = record["knobs"][knob]
            assert seen["base"] == pytest.approx(SCALES[knob][3](base[row]), rel=1e-8, abs=1e-12)
            for key in ("slope", "standard_error"):
                assert_allclose(seen[key], decision.info[key][row], rtol=1e-6)
            if math.isnan(seen["slope"]):
                assert math.isnan(seen["z"])
    assert_allclose(ends[count][0][name]["end base"], [SCALES[n][3](b) for n, b in zip(names, base[1:], strict=True)])


def _places(count: int, spreads: Any, index: int, *, balanced: bool) -> Any:
    """Those of the knobs that are explored; a learning rate that is not needs none."""
    first = 0 if spreads[0] else 1
    places = np.zeros((len(spreads), count))
    places[first:] = assign(count, len(spreads) - first, seed=0, round_index=index, balanced=balanced)
    return places


# -- resuming -------------------------------------------------------------------------------------------------------

# Moves in every round, however small the evidence.
EAGER: dict[str, Any] = {"controller": JointController(doubt=0.0)}
RESUMES: dict[str, tuple[dict[str, Any], int]] = {
    "local, average": ({**EAGER, "gradients": "local", "optimizer_state": "average"}, 8),
    "local, reset": ({**EAGER, "gradients": "local", "optimizer_state": "reset", "outer": "nesterov"}, 12),
    "local, fittest": ({**EAGER, "gradients": "local", "optimizer_state": "average", "outer": "fittest"}, 4),
    "local, nesterov": ({**EAGER, "gradients": "local", "optimizer_state": "average", "outer": "nesterov"}, 8),
    "local, no knobs": ({"names": (), "probe": False, "gradients": "local", "adam": False}, 8),
    "before the first step": ({**EAGER, "gradients": "local", "optimizer_state": "average"}, 0),
    "shared": ({**EAGER, "names": ("temperature",), "probe": False}, 8),
    "shared, probe": ({**EAGER, "names": ("weight_decay", "temperature")}, 12),
    "shared, with learning rate": ({"names": ("learning_rate", "temperature"), "probe": False}, 8),
    "auto, gradient": ({"face": "auto", "names": ("weight_decay", "temperature")}, 8),
    "auto, loss": ({"face": "auto", "signal": "loss", "names": ("weight_decay", "temperature")}, 8),
    "one cycle": ({"face": "one cycle", "names": ("weight_decay",), "ensemble_lr_spread_ratio": 0.1}, 8),
}


def _resume(folder: str, name: str) -> dict[str, Any]:
    options, saved_at = RESUMES[name]
    path = f"{folder}/{name}-{world()[1]}.pt".replace(" ", "_")
    whole = _Run(**options)
    whole.advance(saved_at)
    whole.save(path)
    expected = whole.advance(TOTAL_STEPS)
    resumed = _Run(**options)
    resumed.advance(5)  # the state must replace what is there
    if options.get("face") == "one cycle":
        resumed = _Run(**options)
    resumed.load(path)
    earlier = len(resumed.scheduler.history)
    got = resumed.advance(TOTAL_STEPS)
    later = [record for record in whole.told() if record["step"] > saved_at]
    return {"expected": (expected, later), "got": (got, resumed.told()[earlier:])}


RESUME_CASES = [
    *((2, name) for name in RESUMES),
    *((4, name) for name in ("local, nesterov", "shared, probe")),
]


def _resume_all(folder: str) -> dict[str, Any]:
    chosen = [name for count, name in RESUME_CASES if count == world()[1]]
    return _run_all({name: lambda name=name: _resume(folder, name) for name in chosen})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("resumes"))


@pytest.fixture(scope="module")
def resumes(folder: str) -> dict[int, list[dict[str, Any]]]:
    return OnDemand(lambda n: launch(_resume_all, n, folder, timeout_s=150))


@cases(RESUME_CASES)
def test_a_resumed_run_continues_as_the_uninterrupted_one(
    resumes: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    for result in resumes[count]:
        rows, told = _fine(result[name])["got"]
        expected, later = result[name]["expected"]
        assert [row[0] for row in rows] == [row[0] for row in expected]
        for mine, theirs in zip(rows, expected, strict=True):
            assert_allclose(mine[1], theirs[1], rtol=1e-9)
            assert_allclose(mine[2], theirs[2], rtol=1e-8, atol=1e-11)
        assert [record["index"] for record in told] == [record["index"] for record in later]
        for record, other in zip(told, later, strict=True):
            for knob in other["knobs"]:
                assert_allclose(record["knobs"][knob]["base"], other["knobs"][knob]["base"], rtol=1e-8)


def _go_on(folder: str, name: str, count: int) -> dict[str, Any]:
    run = _Run(**RESUMES[name][0])
    run.load(f"{folder}/{name}-{count}.pt".replace(" ", "_"))
    out: dict[str, Any] = {"base": run.own_values(None), "values": run.values()}
    run.advance(TOTAL_STEPS - 1)
    out["weights"] = run.weights()
    with run.scheduler.converged():
        out["mean"] = run.weights()
    return out


def _go_on_all(folder: str, count: int) -> dict[str, Any]:
    names = ("local, nesterov", "shared, probe")
    return _run_all({name: lambda name=name: _go_on(folder, name, count) for name in names})


@pytest.mark.parametrize(("saved", "count"), [slow(4, 2), (2, 4)])
def test_on_another_number_of_replicas_base_values_stay(
    resumes: dict[int, list[dict[str, Any]]], folder: str, saved: int, count: int
) -> None:
    whole = resumes[saved]
    results = launch(_go_on_all, count, folder, saved)
    for name in results[0]:
        _fine(whole[0][name])
        state = torch.load(f"{folder}/{name}-{saved}.pt".replace(" ", "_"), weights_only=True)[2]["rounds"]
        assert state["num_replicas"] == saved
        bases = [_fine(result[name])["base"] for result in results]
        names = RESUMES[name][0].get("names", ("weight_decay", "temperature", "dropout"))
        expected = [SCALES[n][3](math.log(scale)) for n, scale in zip(names, state["scales"][1:], strict=True)]
        assert saved == 2 or any(scale != 1 for scale in state["scales"][1:])
        for base, result in zip(bases, results, strict=True):
            assert_allclose(base, expected, rtol=1e-9)
            assert result[name]["mean"] == results[0][name]["mean"]
        assert len({str(result[name]["values"]) for result in results}) > 1


def test_alone_a_resumed_run_trains_with_the_base_values(resumes: dict[int, list[dict[str, Any]]], folder: str) -> None:
    for name in ("shared, probe", "local, average"):
        _fine(resumes[2][0][name])
        with pytest.warns(
            UserWarning, match="Explorer compares replicas, and there is one: training continues with"
        ) as w:
            result = _go_on(folder, name, 2)
        assert len(w) == 1
        assert result["values"] == result["base"]
        assert np.isfinite(result["weights"]).all()


# -- states that cannot be used -------------------------------------------------------------------------------------

BREAK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda s: s.update(version=99),
    "no step": lambda s: s.pop("step"),
    "other knobs": lambda s: s["rounds"].update(knobs={"eps": 1e-8}),
    "other order of knobs": lambda s: s["rounds"]["panel"].update(names=["temperature", "weight_decay", "dropout"]),
    "another start": lambda s: s["rounds"]["knobs"].update(dropout=2.0),
    "base_lrs": lambda s: s.update(base_lrs=[0.1, 0.1]),
    "nan scale": lambda s: s["rounds"]["scales"].__setitem__(2, math.nan),
    "negative scale": lambda s: s["rounds"]["scales"].__setitem__(2, -1.0),
    "too few scales": lambda s: s["rounds"]["scales"].pop(),
    "controller": lambda s: s["rounds"]["panel"]["controller"].pop("gram"),
    "controller's size": lambda s: s["rounds"]["panel"]["controller"].update(moment=[0.0]),
    "no panel": lambda s: s["rounds"].pop("panel"),
    "no outer": lambda s: s["rounds"].pop("outer"),
    "outer of another model": lambda s: s["rounds"]["outer"]["centre"].pop(),
    "outer without velocity": lambda s: s["rounds"]["outer"].update(velocity=[]),
    "losses": lambda s: s["rounds"].update(losses={"totals": [1.0], "weights": [1.0]}),
}
SAYS = {
    "version": "state_dict must have version 1, but got version 99",
    "other knobs": r"knobs must be those of the state, ['eps'], but got ['dropout', 'temperature', 'weight_decay']",
    "another start": "dropout must start inside [0, 0.9], but got 2.0",
    "base_lrs": "base_lrs must be 1 finite numbers >= 0, but got [0.1, 0.1]",
    "outer of another model": "the outer step's centre must have the parameters' shapes",
    "outer without velocity": "the outer step's velocity must have the parameters' shapes",
}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _broken_states() -> dict[str, Any]:
    warnings.simplefilter("error")
    options: dict[str, Any] = {"gradients": "local", "outer": "nesterov", "optimizer_state": "average"}
    run, other = _Run(**options), _Run(**options, seed=1)
    run.advance(8)
    other.advance(4)
    with run.scheduler.converged():
        good = run.scheduler.state_dict()
    out: dict[str, Any] = {"good is plain": error(lambda: json.dumps(_plain(good)))}
    for name, spoil in BREAK.items():
        state = copy.deepcopy(good)
        spoil(state)

        def facts() -> Any:
            with other.scheduler.converged():
                return repr((_plain(other.scheduler.state_dict()), other.values(), other.weights()))

        before, own = facts(), (other.values(), other.weights())
        out[name] = error(lambda state=state: other.scheduler.load_state_dict(state))  # type: ignore[misc]
        out[f"{name}: unchanged"] = facts() == before and (other.values(), other.weights()) == own
    return out


@pytest.fixture(scope="module")
def broken_states() -> list[dict[str, Any]]:
    return launch(_broken_states, 2)


@pytest.mark.parametrize("name", BREAK)
def test_a_state_that_cannot_be_used_changes_nothing(broken_states: list[dict[str, Any]], name: str) -> None:
    for result in broken_states:
        assert result["good is plain"] == ""
        assert result[name].startswith("ValueError: state_dict ")
        assert SAYS.get(name, "cannot be loaded") in result[name]
        assert result[f"{name}: unchanged"]


# -- gradients, optimizers' state, health ---------------------------------------------------------------------------


def _like_ddp(momentum: float, state: str) -> dict[str, Any]:
    """Rounds of one step with SGD and nothing to explore are data-parallel training."""
    run = _Run(
        (), adam=False, probe=False, gradients="local", interval=1, momentum=momentum, optimizer_state=state,
        total_steps=None,
    )  # fmt: skip
    plain = _Net()
    parallel = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=momentum)
    rank, count = world()
    far = 0.0
    for step in range(12):
        run.step()
        torch.manual_seed(100 * step + rank)
        x, y = _batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x[rank::count]), y[rank::count]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        theirs = [v for p in plain.parameters() for v in p.detach().flatten().tolist()]
        far = max(far, float(np.abs(np.array(run.weights()) - theirs).max()))
    return {"far": far, "weights": run.weights()}


def _gradients(run: _Run) -> list[float]:
    run.backward()
    return [v for p in run.net.parameters() if p.grad is not None for v in p.grad.flatten().tolist()]


def _sync() -> dict[str, Any]:
    out = {}
    for end in ("finish", "total_steps"):
        run = _Run((), adam=False, probe=False, gradients="local", total_steps=6 if end == "total_steps" else None)
        same = []
        for step in range(6):
            with run.scheduler.converged():  # from the same weights
                rows = everyone(_gradients(run))
                same.append(all(row == rows[0] for row in rows))
            run.optimizer.zero_grad()
            if step == 2:
                with run.model.no_sync():  # type: ignore[operator]
                    run.step()
            else:
                run.step()
        if end == "finish":
            run.scheduler.finish()
        rows = everyone(_gradients(run))
        out[end] = same, all(row == rows[0] for row in rows)
    return out


def _states() -> dict[str, Any]:
    """The optimizers' state just before and just after a round's end."""
    out = {}
    for policy in ("average", "keep", "reset"):
        for adam in (True, False):
            run = _Run(gradients="local", adam=adam, momentum=0.9, optimizer_state=policy, names=("temperature",))
            run.advance(3)
            loss = run.backward()
            run.optimizer.step()
            before = [t.clone().tolist() for t in state_tensors(run.optimizer)]
            run.scheduler.step(loss)
            out[f"{policy} {adam}"] = before, [t.tolist() for t in state_tensors(run.optimizer)]
    return out


def _unhealthy(policy: str) -> dict[str, Any]:
    """Replica 1's weights turn NaN in the second round, and its optimizer's state with them."""
    run = _Run(gradients="local", optimizer_state=policy)
    run.advance(6)
    if run.rank == 1:
        with torch.no_grad():
            run.net.first.weight.fill_(math.nan)
    rows = run.advance(16)
    return {
        "weights": {row[0]: row[2] for row in rows},
        "unhealthy": [record.unhealthy for record in run.scheduler.history],
        "probes": [record.probes for record in run.scheduler.history],
        "rollbacks": run.scheduler.history[-1].num_rollbacks,
        "state": bool(all(torch.isfinite(t).all() for t in state_tensors(run.optimizer))),
    }


def _bad_probe() -> dict[str, Any]:
    run = _Run(gradients="local", controller=JointController())
    run.advance(4)
    run.bad_probe = run.rank == 1
    run.advance(8)
    run.bad_probe = False
    run.advance(TOTAL_STEPS)
    return {"history": run.told(), "weights": run.weights()}


def _apart_from_the_start(outer: str) -> list[float]:
    """Replicas that do not start from the same weights, as after a warm noisy start."""
    run = _Run((), adam=False, probe=False, gradients="local", outer=outer)
    with torch.no_grad():
        run.net.first.weight.add_(run.rank + 1)
    run.advance(4)
    return run.weights()


def _buffer(gradients: str, *, broadcast: bool) -> dict[str, Any]:
    """A temperature that is a buffer, in a model whose buffers DDP may send around from replica 0."""
    try:
        run = _Run(("temperature",), probe=False, gradients=gradients, buffer=True, broadcast=broadcast)
    except ValueError as error:
        return {"error": str(error)}
    seen, pointer = [], run.net.get_buffer("temperature").data_ptr()
    for _ in range(6):
        run.backward()
        seen.append((run.values(), run.own_values(run.rank)))
        run.optimizer.step()
        run.scheduler.step(1.0)
    run.scheduler.converge()
    after_converge = run.values(), run.own_values(run.rank)
    return {"seen": seen, "converged": after_converge, "kept": run.net.get_buffer("temperature").data_ptr() == pointer}


def _loaded_after_finish(folder: str) -> list[float]:
    run = _Run((), adam=False, probe=False, gradients="local")
    run.advance(4)
    run.save(f"{folder}/finished-{run.count}.pt")
    run.scheduler.finish()
    run.load(f"{folder}/finished-{run.count}.pt")
    return _gradients(run)


def _wrapped() -> list[float]:
    """DDP inside another module, as torch.compile leaves it."""
    run = _Run((), adam=False, probe=False, gradients="local", wrapped=True)
    return _gradients(run)


def _without_losses() -> list[float]:
    """Nothing is adapted but by the gradient, which needs no losses."""
    run = _Run(("temperature",), probe=False, face="auto", adapt=False)
    for _ in range(8):
        run.backward()
        run.optimizer.step()
        run.scheduler.step()
    return run.weights()


def _rollback_without_lr() -> dict[str, Any]:
    """A round that breaks all replicas is undone; a learning rate that is not explored is not touched."""
    run = _Run(("temperature",), probe=False, gradients="local")
    run.advance(10)
    with torch.no_grad():
        run.net.first.weight.fill_(math.nan)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.advance(12)
    assert [str(w.message).count("learning rates") for w in told] == [0] * (world()[0] == 0)  # it is said once
    record = run.scheduler.history[-1]
    lr = run.optimizer.param_groups[0]["lr"]
    return {"rollbacks": record.num_rollbacks, "told": record.base_values, "lr": lr, "weights": run.weights()}


def _replicas(folder: str) -> dict[str, Any]:
    cases: Cases = {
        "ddp": lambda: _like_ddp(0.0, "keep"),
        "sync": _sync,
        "unhealthy, keep": lambda: _unhealthy("keep"),
        "bad probe": _bad_probe,
        "apart, nesterov": lambda: _apart_from_the_start("nesterov"),
    }
    if world()[1] == 4:
        return _run_all(cases)
    return _run_all(
        {
            **cases,
            "ddp, momentum": lambda: _like_ddp(0.9, "average"),
            "states": _states,
            **{f"unhealthy, {p}": lambda p=p: _unhealthy(p) for p in ("average", "reset")},
            "apart, mean": lambda: _apart_from_the_start("mean"),
            **{f"buffer, {g}": lambda g=g: _buffer(g, broadcast=False) for g in ("shared", "local")},
            **{f"buffer, {g}, sent": lambda g=g: _buffer(g, broadcast=True) for g in ("shared", "local")},
            "loaded after finish": lambda: _loaded_after_finish(folder),
            "wrapped": _wrapped,
            "without losses": _without_losses,
            "rollback": _rollback_without_lr,
        }
    )


@pytest.fixture(scope="module")
def replicas(folder: str) -> dict[int, list[dict[str, Any]]]:
    return OnDemand(lambda n: launch(_replicas, n, folder, timeout_s=150))


@cases([(2, "ddp"), (4, "ddp"), (2, "ddp, momentum")])
def test_rounds_of_one_step_are_data_parallel_training(
    replicas: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    for result in replicas[count]:
        assert _fine(result[name])["far"] < 1e-6
        assert result[name]["weights"] == replicas[count][0][name]["weights"]


@pytest.mark.parametrize("count", [2, slow(4)])
@pytest.mark.parametrize("end", ["finish", "total_steps"])
def test_gradients_are_not_averaged_inside_a_round_and_are_again_in_the_end(
    replicas: dict[int, list[dict[str, Any]]], count: int, end: str
) -> None:
    for result in replicas[count]:
        assert _fine(result["sync"])[end] == ([False] * 6, True)


@pytest.mark.parametrize("adam", [True, False])
def test_what_becomes_of_the_optimizers_state(replicas: dict[int, list[dict[str, Any]]], adam: bool) -> None:
    found = {p: [_fine(r["states"])[f"{p} {adam}"] for r in replicas[2]] for p in ("average", "keep", "reset")}
    for before, after in found["keep"]:
        assert after == before
    assert found["keep"][0][0] != found["keep"][1][0]
    for _, after in found["average"]:
        assert after == found["average"][0][1]
        for i, tensor in enumerate(after):
            assert_allclose(tensor, np.mean([row[0][i] for row in found["average"]], axis=0), rtol=1e-6, atol=1e-12)
    for _, after in found["reset"]:
        assert after
        assert all((np.array(tensor) == 0).all() for tensor in after)


@cases([(2, "keep"), (4, "keep"), (2, "average"), (2, "reset")], "policy")
def test_a_replica_that_breaks_is_left_out_gets_the_mean_and_recovers(
    replicas: dict[int, list[dict[str, Any]]], count: int, policy: str
) -> None:
    results = [_fine(result[f"unhealthy, {policy}"]) for result in replicas[count]]
    for result in results:
        assert result["weights"][8] == results[0]["weights"][8]
        assert np.isfinite(result["weights"][8]).all()
        assert result["rollbacks"] == 0
        assert np.isnan(result["probes"][1]).tolist() == [False, True, *[False] * (count - 2)]
        assert result["unhealthy"] == [(), (1,), (), ()]
        assert np.isfinite(result["weights"][16]).all()
        assert result["state"]


@pytest.mark.parametrize("count", [2, slow(4)])
def test_a_probe_that_is_not_finite_is_left_out(replicas: dict[int, list[dict[str, Any]]], count: int) -> None:
    results = [_fine(result["bad probe"]) for result in replicas[count]]
    assert all(result["weights"] == results[0]["weights"] for result in results)
    first, second, *later = results[0]["history"]
    assert np.isnan(second["probes"]).tolist() == [False, True, *[False] * (count - 2)]
    assert second["unhealthy"] == ()
    assert np.isfinite([v for record in (first, *later) for v in record["probes"]]).all()
    if count == 2:  # one loss compares nothing
        for name, record in second["knobs"].items():
            assert record["base"] == first["knobs"][name]["base"]
    for record in later:
        assert all(math.isfinite(knob["base"]) for knob in record["knobs"].values())


@cases([(2, "mean"), (2, "nesterov"), (4, "nesterov")], "outer")
def test_after_a_round_weights_are_equal_whatever_replicas_started_from(
    replicas: dict[int, list[dict[str, Any]]], count: int, outer: str
) -> None:
    for result in replicas[count]:
        assert _fine(result[f"apart, {outer}"]) == replicas[count][0][f"apart, {outer}"]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_knob_that_is_a_buffer_keeps_each_replicas_value(
    replicas: dict[int, list[dict[str, Any]]], gradients: str
) -> None:
    for result in replicas[2]:
        found = _fine(result[f"buffer, {gradients}"])
        for values, own in found["seen"]:
            assert values == pytest.approx(own, rel=1e-6)
        assert found["converged"][0] == pytest.approx(found["converged"][1], rel=1e-6)
        assert found["kept"]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_knob_that_is_a_buffer_is_not_overwritten_by_replica_0(
    replicas: dict[int, list[dict[str, Any]]], gradients: str
) -> None:
    """DDP broadcasts buffers: either such a knob is refused, with the remedy, or it is kept all the same."""
    for result in replicas[2]:
        found = _fine(result[f"buffer, {gradients}, sent"])
        assert "buffers" in found.get("error", "buffers")
        for values, own in found.get("seen", []):
            assert values == pytest.approx(own, rel=1e-6)


def test_a_finished_explorer_that_continues_from_a_state_has_local_gradients_again(
    replicas: dict[int, list[dict[str, Any]]],
) -> None:
    found = [_fine(result["loaded after finish"]) for result in replicas[2]]
    assert found[0] != found[1]


def test_gradients_are_local_where_ddp_is_inside_another_module(replicas: dict[int, list[dict[str, Any]]]) -> None:
    found = [_fine(result["wrapped"]) for result in replicas[2]]
    assert found[0] != found[1]


def test_knobs_that_are_only_explored_need_no_losses(replicas: dict[int, list[dict[str, Any]]]) -> None:
    found = [_fine(result["without losses"]) for result in replicas[2]]
    assert found[0] == found[1]


def test_a_rollback_tells_the_truth_about_a_learning_rate_that_is_not_explored(
    replicas: dict[int, list[dict[str, Any]]],
) -> None:
    for result in replicas[2]:
        found = _fine(result["rollback"])
        assert found["rollbacks"] == 1
        assert np.isfinite(found["weights"]).all()
        assert found["lr"] == LR
        assert found["told"] == (LR,)


# -- errors ---------------------------------------------------------------------------------------------------------


def _explore(*own: Any, **options: Any) -> Callable[[], Explorer]:
    def make() -> Explorer:
        net = _Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
        return Explorer(net, optimizer, **grouped(**{"knobs": own, "interval": 2, **options}))

    return make


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "gradients": (
        _explore(knobs.Epsilon(), gradients="none"),
        'ValueError: gradients must be one of "shared", "local", but got gradients=\'none\'',
    ),
    "outer": (
        _explore(knobs.Epsilon(), outer="median"),
        'ValueError: outer must be one of "mean", "fittest", "grawa", "nesterov", "elastic", but got outer=\'median\'',
    ),
    "optimizer_state": (
        _explore(knobs.Epsilon(), optimizer_state="drop"),
        'ValueError: optimizer_state must be one of "average", "keep", "reset", but got optimizer_state=\'drop\'',
    ),
    "assignment": (
        _explore(knobs.Epsilon(), assignment="random"),
        'ValueError: assignment must be one of "balanced", "permutation", but got assignment=\'random\'',
    ),
    "anchor": (
        _explore(knobs.Epsilon(), anchor="here"),
        'ValueError: anchor must be "start", "round" or a number of rounds >= 1, but got anchor=\'here\'',
    ),
    "interval": (
        _explore(knobs.Epsilon(), interval=0),
        "ValueError: interval must be an integer >= 1, but got interval=0",
    ),
    "total_steps": (
        _explore(knobs.Epsilon(), total_steps=0),
        "ValueError: total_steps must be an integer >= 1, but got total_steps=0",
    ),
    "max_rollbacks": (
        _explore(knobs.Epsilon(), max_rollbacks=-1),
        "ValueError: max_rollbacks must be an integer >= 0, but got max_rollbacks=-1",
    ),
    "seed": (_explore(knobs.Epsilon(), seed=-1), "ValueError: seed must be an integer >= 0, but got seed=-1"),
    "learning rate twice": (
        _explore(knobs.LearningRate(), knobs.LearningRate()),
        "ValueError: knobs must contain LearningRate once at most, but got 2",
    ),
    "the same knob twice": (
        _explore(knobs.Epsilon(), knobs.Epsilon()),
        "ValueError: knobs must have different names, but got ['eps', 'eps']; pass name=",
    ),
    "nothing to explore": (
        _explore(),
        'ValueError: knobs must not be empty with gradients="shared": there would be nothing to explore',
    ),
    "nesterov of equal replicas": (
        _explore(outer="nesterov"),
        'ValueError: outer="nesterov" needs replicas that differ; use gradients="local", or pass knobs',
    ),
    "no knob": (_explore("eps"), "TypeError: knobs must be made of hdet.ensemble.knobs, but got str"),
    "no probe": (
        _explore(knobs.Epsilon(), probe=1.0),
        "TypeError: probe must be a function that returns a loss, but got float",
    ),
    "what cannot be learned": (
        _explore(knobs.WeightDecay()),
        "ValueError: weight_decay cannot be adapted with gradients='shared' and the training loss",
    ),
    "no model": (
        lambda: Explorer(3, torch.optim.SGD([nn.Parameter(torch.ones(1))]), interval=1),  # type: ignore[arg-type]
        "TypeError: model must be an nn.Module, but got int",
    ),
    "no optimizer": (
        lambda: Explorer(nn.Linear(1, 1), 3, interval=1),  # type: ignore[arg-type]
        "TypeError: optimizer must be a torch.optim.Optimizer, but got int",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    make, text = BAD[name]
    assert error(make).startswith(text)


def _face(kind: str, **options: Any) -> Any:
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    if kind == "auto":
        return AutoLR(CosineAnnealingLR(optimizer, 10), **with_ensemble(**options))
    return OneCycleAutoLR(optimizer, LR, 10, auto_lr_warmup_steps=2, **with_ensemble(**options))


def test_knobs_that_would_never_move_are_refused() -> None:
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    with pytest.raises(ValueError, match="auto_lr_warmup_steps must be smaller than the 10 total steps for knobs"):
        OneCycleAutoLR(optimizer, LR, 10, model=net, ensemble=Ensemble(knobs=[knobs.WeightDecay()]), probe=lambda: 1.0)


@pytest.mark.parametrize("kind", ["auto", "one cycle"])
def test_one_process_with_knobs_warns(kind: str) -> None:
    with pytest.warns(UserWarning, match="knobs are explored by several replicas, and there is one"):
        _face(kind, model=_Net(), knobs=[knobs.Epsilon()])


@pytest.mark.parametrize("kind", ["auto", "one cycle"])
def test_what_schedulers_refuse(kind: str) -> None:
    with pytest.raises(
        ValueError, match="knobs must not contain LearningRate here: the scheduler explores the learning"
    ):
        _face(kind, knobs=[knobs.LearningRate()])
    with pytest.raises(ValueError, match="probe= needs model=, the one that is trained, wrapped as it is"):
        _face(kind, knobs=[knobs.WeightDecay()], probe=lambda: 1.0)
    with pytest.raises(ValueError, match='gradients="local" needs model=, the one that is trained, wrapped as it is'):
        _face(kind, knobs=[knobs.Epsilon()], gradients="local")
    with pytest.raises(
        ValueError, match=r"weight_decay cannot be adapted with gradients='shared' and the training los"
    ):
        _face(kind, knobs=[knobs.WeightDecay()])
    if kind == "one cycle":
        with pytest.raises(
            ValueError, match=r"knobs must not contain Momentum while the schedule moves it; pass cycle_"
        ):
            _face(kind, knobs=[knobs.Momentum()])


def test_one_process_warns_once_and_trains_on() -> None:
    with pytest.warns(UserWarning, match="Explorer compares replicas, and there is one: training continues with"):
        run = _Run(("learning_rate", "weight_decay", "temperature"))
    start = run.values()
    before = run.weights()
    run.advance(TOTAL_STEPS - 1)  # a second warning would be an error
    state = run.scheduler.state_dict()
    with run.scheduler.converged():
        assert run.values() == start
    run.step()
    run.scheduler.finish()
    assert run.values() == start == [LR, DECAY, 1.0]
    assert run.weights() != before
    assert state["step"] == TOTAL_STEPS - 1
    assert run.scheduler.history == []
    assert error(run.step).startswith(f"RuntimeError: training was finished at step {TOTAL_STEPS}")


def _misuse() -> dict[str, Any]:
    warnings.simplefilter("error")
    out: dict[str, Any] = {}
    rank = dist.get_rank()

    run = _Run(gradients="local")
    run.advance(2)
    with run.scheduler.converged():
        out["inside converged"] = error(lambda: run.scheduler.step(1.0))
    run.advance(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.scheduler.state_dict()
    out["apart"] = [str(w.message) for w in caught]

    ended = _Run(gradients="local")
    ended.advance(2)
    with ended.scheduler.converged():
        out["finish inside converged"] = error(ended.scheduler.finish)

    other = _Run(("learning_rate",), probe=False)
    schedule = ExponentialLR(other.optimizer, 0.9)
    other.step()
    schedule.step()
    out["another scheduler"] = error(lambda: other.advance(4))
    free = _Run(("temperature",), probe=False)
    schedule = ExponentialLR(free.optimizer, 0.9)
    for _ in range(8):
        free.step()
        schedule.step()
    out["free"] = [record.base_values for record in free.scheduler.history]

    silent = _Run(("temperature",), probe=False)

    def without_losses() -> None:
        for _ in range(4):
            silent.backward()
            silent.optimizer.step()
            silent.scheduler.step()

    out["no losses"] = error(without_losses)

    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY * (1 + rank))
    eps = [knobs.Epsilon(spread=0.5 - 0.1 * rank)]
    cases: dict[str, Any] = {
        "spread": eps,
        "start": [knobs.WeightDecay(adapt=False)],
        "one more on replica 0": [knobs.Epsilon(), *([knobs.Beta2()] if rank == 0 else [])],
        "one more on replica 1": [knobs.Epsilon(), *([knobs.Beta2()] if rank == 1 else [])],
        "another": [knobs.Epsilon() if rank == 0 else knobs.Beta2()],
    }
    for name, own in cases.items():
        out[name] = error(lambda own=own: Explorer(net, optimizer, knobs=own, interval=2))  # type: ignore[misc]
    out["outer"] = error(
        lambda: Explorer(
            net, optimizer, interval=2, gradients="local", averaging=Averaging(outer="mean" if rank else "nesterov")
        )
    )
    return out


@pytest.fixture(scope="module")
def misuse() -> list[dict[str, Any]]:
    return launch(_misuse, 2)


def test_misuse_raises_on_every_replica(misuse: list[dict[str, Any]]) -> None:
    for result in misuse:
        assert result["inside converged"].startswith(
            "RuntimeError: step() must not be called inside `with converged():`"
        )
        assert result["finish inside converged"].startswith(
            "RuntimeError: finish() must not be called inside `with converged():`"
        )
        assert result["another scheduler"].startswith(
            "RuntimeError: learning rates must be left to the Explorer that explores them, but ["
        )
        assert (
            "use AutoLR(schedule, ensemble=Ensemble(knobs=[...])) instead of a LearningRate knob"
            in result["another scheduler"]
        )
        assert "needs a loss from every replica in every round, but replicas [0, 1] gave none" in result["no losses"]
        assert len(result["apart"]) == 1
        assert "state_dict() at step 3, where replicas are apart" in result["apart"][0]
        assert_allclose(result["free"], [(LR * 0.9**3,), (LR * 0.9**7,)], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "spread",
            "knob eps=Epsilon(start=1e-08, low=1e-12, high=0.01, space=log, spread=0.5, adapt=True) on replicas [",
        ),
        (
            "start",
            "knob weight_decay=WeightDecay(start=0.05, low=1e-06, high=10.0, space=log, spread=0.3, adapt=False) o",
        ),
        ("one more on replica 0", "knob beta2=Beta2(start=0.999"),
        ("one more on replica 1", "knob beta2="),
        ("another", "knob eps=Epsilon(start=1e-08"),
        ("outer", "outer=Nesterov(lr=0.7, momentum=0.9) on replicas [0], Mean()"),
    ],
)
def test_replicas_that_disagree_about_their_knobs_all_say_so(
    misuse: list[dict[str, Any]], name: str, text: str
) -> None:
    for result in misuse:
        assert result[name].startswith("ValueError: replicas must agree about their arguments and parameters, but got ")
        assert text in result[name]
