"""The stacked engine against separate models trained with torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_lab.models.feed import FeedModel
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.optim import SGD, Adam, Lion, Muon, StackedOptimizer, make_layout, outer_matrices
from hdet_lab.tasks import TextTask, split_rows

RUNS, REPLICAS, STEPS = 2, 3, 5
Params = list[dict[str, Any]]


@pytest.fixture
def task() -> TextTask:
    text = torch.arange(400) * 7 % 13
    return TextTask("t", text, 13, context=6, num_layers=1, width=8, num_heads=2, batch_rows=6, num_validation=10)


def make(task: TextTask, optimizer: StackedOptimizer, **options: object) -> StackedModels:
    models = [task.build(seed).double() for seed in range(RUNS)]
    return StackedModels(
        models,
        task.loss,
        task.groups(models[0]),
        num_replicas=REPLICAS,
        optimizer=optimizer,
        dtype=torch.float64,
        **options,  # type: ignore[arg-type]
    )


def stacked_batch(task: TextTask, step: int) -> tuple[Tensor, ...]:
    return task.gather(torch.stack([split_rows(task.rows(step, seed=run), REPLICAS) for run in range(RUNS)]))


def learning_rates(step: int) -> Tensor:
    base = torch.tensor([[0.01, 0.03]]) / (1 + 0.1 * step)
    spread = torch.tensor([0.5, 1.0, 1.5]).roll(step)
    return (base.T[:, None] * torch.stack([spread, 2 * spread.flip(0)], -1)[None]).double()


class ReferenceLion(torch.optim.Optimizer):
    def __init__(self, groups: Params, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": 1.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * ((0.9 * m + 0.1 * p.grad).sign() + group["weight_decay"] * p))
                m.copy_(0.99 * m + 0.01 * p.grad)


class MuonAndAdam(torch.optim.Optimizer):
    """Each param group's matrices inside the blocks with Muon, the rest with Adam."""

    def __init__(self, groups: Params) -> None:
        super().__init__(groups, {"lr": 1.0})
        self.inner: list[list[torch.optim.Optimizer]] = []
        for group in self.param_groups:
            hidden: list[Tensor] = []
            others: list[Tensor] = []
            for name, p in zip(group["names"], group["params"], strict=True):
                (hidden if name.startswith("blocks.") and p.dim() == 2 else others).append(p)
            muon = [torch.optim.Muon(hidden, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")] if hidden else []
            self.inner.append([*muon, torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.3)])

    def step(self, closure: Any = None) -> Any:
        for group, optimizers in zip(self.param_groups, self.inner, strict=True):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = group["lr"]
                optimizer.step()


OPTIMIZERS: dict[str, tuple[StackedOptimizer, Callable[[Params], torch.optim.Optimizer]]] = {
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=1.0)),
    "momentum": (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
    "sgd-decay": (
        SGD(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (Adam(betas=(0.9, 0.95)), lambda p: torch.optim.Adam(p, betas=(0.9, 0.95))),
    "adam-decay": (Adam(weight_decay=0.1), lambda p: torch.optim.Adam(p, weight_decay=0.1)),
    "adamw": (Adam(weight_decay=0.3, decoupled=True), lambda p: torch.optim.AdamW(p, weight_decay=0.3)),
    "lion": (Lion(), ReferenceLion),
    "lion-decay": (Lion(weight_decay=0.3), lambda p: ReferenceLion(p, weight_decay=0.3)),
    "muon": (Muon(weight_decay=0.3), MuonAndAdam),
}


@pytest.mark.parametrize(
    ("name", "shared", "max_grad_norm"),
    [
        *((name, True, None) for name in OPTIMIZERS),
        ("momentum", True, 0.05),
        ("adamw", False, 0.05),
        ("muon", False, None),
    ],
)
def test_matches_torch_optim_on_separate_models(
    task: TextTask, name: str, shared: bool, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # torch's Muon would round to it
    mine, theirs = OPTIMIZERS[name]
    engine = make(task, mine, shared=shared, max_grad_norm=max_grad_norm)
    models: list[list[nn.Module]] = []
    optimizers: list[list[torch.optim.Optimizer]] = []
    for run in range(RUNS):
        start = task.build(run).double()
        models.append([copy.deepcopy(start) for _ in range(REPLICAS)])
        optimizers.append([])
        for model in models[run]:
            named = dict(model.named_parameters())
            groups = task.groups(model).values()
            optimizers[run].append(theirs([{"params": [named[n] for n in g], "names": list(g)} for g in groups]))

    for step in range(STEPS):
        batch, lrs = stacked_batch(task, step), learning_rates(step)
        losses = engine.step(batch, lrs).losses
        for run in range(RUNS):
            for replica, model in enumerate(models[run]):
                model.zero_grad()
                loss = task.loss(model, tuple(t[run, replica] for t in batch))
                loss.backward()  # type: ignore[no-untyped-call]
                torch.testing.assert_close(losses[run, replica], loss.detach(), rtol=1e-10, atol=1e-12)
            if shared:
                for twins in zip(*(m.parameters() for m in models[run]), strict=True):
                    mean = torch.stack([p.grad for p in twins if p.grad is not None]).mean(0)
                    for p in twins:
                        p.grad = mean.clone()
            for replica, model in enumerate(models[run]):
                if max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                for group, values in enumerate(optimizers[run][replica].param_groups):
                    values["lr"] = lrs[run, replica, group].item()
                optimizers[run][replica].step()
                expected = engine.flatten(dict(model.named_parameters()))
                torch.testing.assert_close(engine.weights[run, replica], expected, rtol=1e-9, atol=1e-12)

    validation = task.gather(task.validation_rows)
    means = engine.evaluate([tuple(t[:4] for t in validation), tuple(t[4:] for t in validation)])
    for run in range(RUNS):
        assert task.evaluate(engine.mean_model(run))["loss"] == pytest.approx(means[run].item(), rel=1e-10)


@pytest.mark.parametrize(("muon", "adjusted"), [(Muon(), "match_rms_adamw"), (Muon(adam_share=0.1), "original")])
def test_muon_adjusts_its_updates_as_torch_does(muon: Muon, adjusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    shapes = {"tall": (12, 5), "wide": (5, 12), "tall2": (12, 5), "square": (6, 6)}
    layout = make_layout(shapes, map(torch.Size, shapes.values()))
    sizes = (2, 2, layout[-1].columns.stop)
    state, moved = muon.init(torch.zeros(sizes), layout), torch.zeros(sizes)
    assert state["first"].numel() == 0  # every parameter is a hidden matrix

    models = [[[nn.Parameter(torch.zeros(s)) for s in shapes.values()] for _ in range(2)] for _ in range(2)]
    optimizers = [[torch.optim.Muon(p, 1.0, 0.0, adjust_lr_fn=adjusted) for p in run] for run in models]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradient = torch.randn(sizes, generator=generator)
        moved -= muon.update(state, gradient, moved, layout)
        for run in range(2):
            for replica, parameters in enumerate(models[run]):
                for slot, p in zip(layout, parameters, strict=True):
                    p.grad = gradient[run, replica, slot.columns].view(slot.shape)
                optimizers[run][replica].step()  # type: ignore[no-untyped-call]
                expected = torch.cat([p.detach().flatten() for p in parameters])
                torch.testing.assert_close(moved[run, replica], expected, rtol=1e-4, atol=1e-5)
    assert moved.abs().mean() > 0.2


def test_muon_leaves_embeddings_outputs_and_vectors_to_adam(task: TextTask) -> None:
    feed = FeedModel(
        num_items=5, num_fields=2, num_values=9, num_labels=3, history=4, width=8, num_layers=1, num_heads=2,
        field_width=2,
    )  # fmt: skip
    blocks = {f"blocks.0.{n}.weight" for n in ("attention.qkv", "attention.out", "up", "down")}
    for model, expected in ((task.build(), blocks), (feed, blocks | {"mlp_in.weight", "mlp_mid.weight"})):
        named = dict(model.named_parameters())
        layout = make_layout(named, (p.shape for p in named.values()))
        assert {slot.name for slot in layout if Muon().is_hidden_matrix(slot)} == expected


def test_embeddings_and_outputs_are_known_by_what_they_are() -> None:
    letters, hidden = nn.Embedding(5, 8), nn.Linear(8, 8)
    for model, expected in (
        (nn.Sequential(letters, hidden, nn.Linear(8, 3)), {"1.weight"}),
        (nn.Sequential(letters, hidden, nn.Linear(3, 8)), {"1.weight", "2.weight"}),  # the embedding is the output, too
        (nn.ModuleDict({"places": letters, "head": nn.Linear(8, 3), "up": hidden}), {"up.weight"}),
    ):
        named = dict(model.named_parameters())
        layout = make_layout(named, (p.shape for p in named.values()))
        muon = Muon(not_hidden=outer_matrices(model))
        assert {slot.name for slot in layout if muon.is_hidden_matrix(slot)} == expected


def test_replicas_stay_on_the_anchor_line(task: TextTask) -> None:
    engine = make(task, Adam())
    rho = torch.tensor([0.5, 1.0, 1.5]).double()
    for step in range(4):
        engine.step(stacked_batch(task, step), (0.01 * rho)[None, :, None].expand(RUNS, -1, 2))
    moved = engine.weights - engine.anchors[:, None]
    torch.testing.assert_close(moved, rho[None, :, None] * moved[:, 1:2], rtol=1e-9, atol=1e-12)


def test_place_puts_each_group_on_the_line_through_the_anchor(task: TextTask) -> None:
    engine = make(task, SGD())
    anchor = engine.anchors.clone()
    for step in range(3):
        engine.step(stacked_batch(task, step), learning_rates(step))
    mean = engine.weights.mean(1)
    rho = torch.tensor([[[0.5, 1.2], [1.0, 1.0], [1.5, 0.8]]], dtype=torch.float64).expand(RUNS, -1, -1)
    engine.place(rho)
    for run in range(RUNS):
        for replica in range(REPLICAS):
            placed = engine.unflatten(engine.weights[run, replica])
            start, centre = engine.unflatten(anchor[run]), engine.unflatten(mean[run])
            for group, names in enumerate(task.groups(engine.model).values()):
                for n in names:
                    expected = start[n] + rho[run, replica, group] * (centre[n] - start[n])
                    torch.testing.assert_close(placed[n], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(engine.mean(), mean, rtol=1e-12, atol=1e-14)


def test_slopes_are_the_derivative_of_the_loss_along_the_line(task: TextTask) -> None:
    engine = make(task, SGD(momentum=0.9))
    for step in range(5):
        engine.step(stacked_batch(task, step), learning_rates(step))
    engine.converge()
    batch, still = stacked_batch(task, 9), torch.zeros(RUNS, REPLICAS, 2)
    slopes = engine.step(batch, still).slopes
    assert slopes.abs().min() > 1e-6
    centre, h = engine.weights.clone(), 1e-5
    for group in range(2):
        sides = []
        for sign in (1, -1):
            engine.weights.copy_(centre)
            rho = torch.ones(RUNS, REPLICAS, 2).double()
            rho[..., group] += sign * h
            engine.place(rho)
            sides.append(engine.step(batch, still).losses.mean(1))
        difference = (sides[0] - sides[1]) / (2 * h)
        torch.testing.assert_close(slopes[:, group], difference, rtol=1e-6, atol=1e-9)


def test_converge_reports_how_far_apart_replicas_were(task: TextTask) -> None:
    engine = make(task, SGD())
    engine.step(stacked_batch(task, 0), learning_rates(0))
    mean = engine.weights.mean(1, keepdim=True)
    expected = (engine.weights - mean).norm(dim=-1)
    torch.testing.assert_close(engine.converge(), expected)
    torch.testing.assert_close(engine.weights, mean.expand_as(engine.weights), rtol=0, atol=0)


def test_anchor_moves_for_chosen_runs_only(task: TextTask) -> None:
    engine = make(task, SGD())
    start = engine.anchors.clone()
    engine.step(stacked_batch(task, 0), learning_rates(0))
    engine.set_anchor(torch.tensor([False, True]))
    assert torch.equal(engine.anchors[0], start[0])
    assert torch.equal(engine.anchors[1], engine.mean()[1])


@pytest.mark.parametrize("name", ["momentum", "adam", "lion", "muon"])
def test_a_restored_run_repeats_itself_and_leaves_the_other_alone(task: TextTask, name: str) -> None:
    engine = make(task, OPTIMIZERS[name][0])

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            engine.step(stacked_batch(task, step), learning_rates(step))

    train(0, 2)
    engine.snapshot()
    engine.snapshot()  # what is restored is the last snapshot but one
    train(2, 4)
    after = engine.weights.clone()
    for _ in range(2):
        engine.snapshot(torch.tensor([False, True]))
    engine.restore(torch.tensor([True, False]))
    assert not torch.equal(engine.weights[0], after[0])
    assert torch.equal(engine.weights[1], after[1])
    train(2, 4)
    torch.testing.assert_close(engine.weights[0], after[0], rtol=1e-12, atol=0)
    assert not torch.equal(engine.weights[1], after[1])
    engine.restore(torch.tensor([False, True]))
    assert torch.equal(engine.weights[1], after[1])


@pytest.mark.parametrize("optimizer", [Adam(), Muon()])
def test_a_broken_run_leaves_the_other_alone(task: TextTask, optimizer: StackedOptimizer) -> None:
    healthy, broken = make(task, optimizer), make(task, optimizer)
    broken.weights[0] = torch.nan
    for step in range(3):
        for engine in (healthy, broken):
            result = engine.step(stacked_batch(task, step), learning_rates(step))
    assert result.losses[0].isnan().all()
    torch.testing.assert_close(broken.weights[1], healthy.weights[1], rtol=1e-12, atol=1e-14)
    broken.restore(torch.tensor([True, False]))
    assert broken.weights.isfinite().all()


def test_groups_must_name_every_parameter(task: TextTask) -> None:
    model = task.build()
    with pytest.raises(ValueError, match=r"groups must name every parameter once, but they differ in \['blocks"):
        StackedModels([model], task.loss, {"head": ["head.weight"]}, num_replicas=1, optimizer=SGD())


def test_one_model_may_do_what_vmap_cannot(task: TextTask) -> None:
    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        batch[0][None, None].is_contiguous(memory_format=torch.channels_last)  # as in convolutions on a GPU
        return task.loss(model, batch)

    model = task.build(0).double()
    groups, options = task.groups(model), {"num_replicas": 1, "dtype": torch.float64}
    engines = [
        StackedModels([model], each, groups, optimizer=Adam(), **options)  # type: ignore[arg-type]
        for each in (loss, task.loss)
    ]
    two = StackedModels([model, model], task.loss, groups, optimizer=Adam(), **options)  # type: ignore[arg-type]
    for step in range(3):
        batch = task.gather(task.rows(step, seed=0)[None, None])
        lrs = torch.full((1, 1, len(groups)), 0.01).double()
        for engine in engines:
            engine.step(batch, lrs)
        two.step(tuple(t.expand(2, *t.shape[1:]) for t in batch), lrs.expand(2, 1, -1))
    torch.testing.assert_close(engines[0].weights, engines[1].weights, rtol=0, atol=0)
    torch.testing.assert_close(two.weights[1:], engines[0].weights, rtol=1e-9, atol=1e-12)
