"""Tasks of other kinds, each as small as it goes."""

from __future__ import annotations

import io
import json
import math
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdet_lab.bench.suite import ENTRIES, METHODS, Entry, jobs
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import TASKS, half_d, half_e, half_f, half_g, half_h, half_i, half_j, packages
from small_tasks import write_sets

RNG = np.random.default_rng(0)
SMALL: dict[str, dict[str, Any]] = {
    "cifar10": {
        "train_images": RNG.integers(0, 256, (40, 32, 32, 3)).astype("u1"),
        "train_labels": RNG.integers(0, 10, 40).astype("u1"),
        "test_images": RNG.integers(0, 256, (20, 32, 32, 3)).astype("u1"),
        "test_labels": RNG.integers(0, 10, 20).astype("u1"),
    },
    "wikitext": {"words": RNG.integers(0, 8000, 4000).astype("i2")},
    "bible": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "phonemes": {
        "letters": RNG.integers(1, 27, (60, 12)).astype("u1"),
        "phones": RNG.integers(3, 42, (60, 14)).astype("u1"),
    },
    "cities": {
        "names": RNG.integers(0, 64, (60, 24)).astype("u1"),
        "places": RNG.uniform(-90, 90, (60, 2)).astype("f4"),
        "countries": RNG.integers(0, 64, 60).astype("u1"),
    },
    "speech": {"samples": RNG.integers(0, 256, 40 * 512).astype("u1")},
    "diamonds": {
        "inputs": RNG.uniform(1, 9, (60, 9)).astype("f4"),
        "targets": RNG.uniform(300, 9000, 60).astype("f4"),
    },
    "movielens": {
        "users": RNG.integers(0, 20, 60).astype("i2"),
        "films": RNG.integers(0, 30, 60).astype("i2"),
        "ratings": RNG.uniform(1, 5, 60).astype("f4"),
    },
    "tunes": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "javascript": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "czech": {
        "letters": RNG.integers(0, 128, 60 * 32 + 5).astype("u1"),
        "marks": RNG.integers(0, 4, 60 * 32 + 5).astype("u1"),
    },
    "wordnet": {
        "letters": RNG.integers(0, 32, (60, 20)).astype("u1"),
        "words": RNG.integers(0, 6000, (60, 16)).astype("i2"),
    },
    "digits": {
        "train_images": RNG.integers(0, 256, (40, 28, 28)).astype("u1"),
        "train_labels": RNG.integers(0, 10, 40).astype("u1"),
        "test_images": RNG.integers(0, 256, (20, 28, 28)).astype("u1"),
        "test_labels": RNG.integers(0, 10, 20).astype("u1"),
    },
    "hanzi": {
        "moves": RNG.integers(-90, 90, (60, 40, 2)).astype("i2"),
        "lifts": RNG.integers(0, 3, (60, 40)).astype("u1"),
    },
    "baseball": {
        "players": RNG.integers(0, 20, 60).astype("i2"),
        "teams": RNG.integers(0, 5, 60).astype("i2"),
        "numbers": RNG.uniform(0, 200, (60, 3)).astype("f4"),
        "runs": RNG.uniform(0, 100, 60).astype("f4"),
    },
    "languages": {
        "letters": RNG.integers(0, 256, (60, 32)).astype("u1"),
        "languages": RNG.integers(0, 64, 60).astype("u1"),
    },
    "lemmas": {
        "letters": RNG.integers(1, 27, (60, 14)).astype("u1"),
        "lemmas": np.pad(RNG.integers(1, 27, (60, 9)), ((0, 0), (1, 6))).astype("u1"),
    },
    "manual": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "hotels": {
        "kinds": RNG.integers(0, 5, (60, 9)).astype("u1"),
        "numbers": RNG.uniform(0, 9, (60, 17)).astype("f4"),
        "prices": RNG.uniform(20, 300, 60).astype("f4"),
    },
    "survival": {
        "numbers": RNG.uniform(0, 99, (60, 8)).astype("f4"),
        "days": RNG.uniform(1, 7000, 60).astype("f4"),
        "died": RNG.integers(0, 2, 60).astype("u1"),
    },
    "demand": {"hours": RNG.uniform(0, 9, (1500, 3)).astype("f4")},
    "senses": {
        "links": RNG.integers(0, 60, (60, 5)).astype("i4"),
        "fields": RNG.integers(0, 45, 60).astype("u1"),
    },
    "hyphens": {
        "letters": RNG.integers(1, 31, (60, 20)).astype("u1"),
        "breaks": RNG.integers(0, 2, (60, 20)).astype("u1"),
    },
    "unicode": {
        "letters": RNG.integers(1, 39, (60, 40)).astype("u1"),
        "categories": RNG.integers(0, 26, 60).astype("u1"),
    },
    "icons": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "coasts": {
        "places": RNG.uniform(-90, 90, (60, 2)).astype("f4"),
        "land": RNG.integers(0, 2, 60).astype("u1"),
    },
    "films": {
        "numbers": RNG.uniform(0, 2000, (60, 10)).astype("f4"),
        "ratings": RNG.uniform(1, 10, 60).astype("f4"),
    },
    "quotes": {"text": RNG.integers(0, 256, 4000).astype("u1")},
    "colours": {
        "letters": RNG.integers(0, 30, (60, 24)).astype("u1"),
        "colours": RNG.integers(0, 256, (60, 3)).astype("u1"),
    },
    "glyphs": {"points": RNG.integers(0, 256, (60, 32)).astype("u1")},
    "visits": {
        "numbers": RNG.uniform(0, 9, (60, 15)).astype("f4"),
        "visits": RNG.integers(0, 9, 60).astype("f4"),
    },
    "spellings": {"letters": np.pad(RNG.integers(1, 27, (60, 9)), ((0, 0), (0, 5))).astype("u1")},
    "melting": {
        "letters": np.pad(RNG.integers(1, 40, (60, 30)), ((0, 0), (0, 18))).astype("u1"),
        "kelvin": RNG.uniform(100, 900, 60).astype("f4"),
    },
    "voices": {
        "clips": RNG.integers(0, 34, (60, 16, 24)).astype("u1"),
        "voices": RNG.integers(0, 5, 60).astype("u1"),
    },
    "webster": {"words": RNG.integers(0, 8000, 4000).astype("i2")},
    "readings": {
        "words": RNG.integers(1, 2048, (60, 6)).astype("i2"),
        "kana": np.pad(RNG.integers(1, 87, (60, 8)), ((0, 0), (0, 4))).astype("u1"),
    },
    "banners": {
        "drawn": RNG.integers(0, 95, (60, 10, 16)).astype("u1"),
        "kinds": RNG.integers(0, 36, 60).astype("u1"),
    },
    "births": {
        "states": RNG.integers(0, 51, 60).astype("u1"),
        "days": RNG.integers(0, 7305, 60).astype("u2"),
        "births": RNG.integers(1, 900, 60).astype("u2"),
    },
    "lectures": {
        "kinds": RNG.integers(0, 5, (60, 6)).astype("i2"),
        "marks": RNG.integers(0, 5, 60).astype("u1"),
    },
    "glucose": {
        "glucose": RNG.integers(40, 400, 400).astype("i2"),
        "minutes": (5 * np.arange(400) + 3 * (np.arange(400) >= 100)).astype("i4"),
    },
    "stars": {"stars": RNG.uniform(-0.4, 2.4, (60, 4)).astype("f4")},
    "heights": {
        "places": RNG.uniform(-80, 80, (60, 2)).astype("f4"),
        "feet": RNG.uniform(0, 9000, 60).astype("f4"),
        "near": RNG.integers(0, 48, (60, 8)).astype("u2"),
    },
    "wages": {
        "kinds": RNG.integers(0, 5, (60, 5)).astype("u1"),
        "numbers": RNG.uniform(0, 90, (60, 4)).astype("f4"),
        "dollars": RNG.uniform(300, 90_000, 60).astype("f4"),
    },
}
MADE: dict[str, Callable[..., Any]] = {
    "adding": half_d.AddingTask,
    "sorting": half_d.SortingTask,
    "parity": half_d.ParityTask,
    "density": half_d.DensityTask,
    "spirals": half_d.SpiralsTask,
    "teacher": half_d.TeacherTask,
    "masks": half_d.MasksTask,
}
SIZES: dict[str, dict[str, int]] = {
    **{name: {"num": 5000, "batch_rows": 8} for name in MADE},
    "masks": {"num": 40, "batch_rows": 8},
    "spirals": {"num": 50},
    "boxes": {"num": 60, "batch_rows": 8},
    "pendulum": {"num": 60, "batch_rows": 8},
    "clouds": {"num": 60, "batch_rows": 8},
    "bible-gpt": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "bible-rnn": {"batch_rows": 8, "context": 16, "num_validation": 8},
    "picture": {"side": 12, "batch_rows": 8},
    "tunes-gpt": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "javascript": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "physics": {"num": 60, "batch_rows": 8},
    "control": {"num": 60, "batch_rows": 8},
    "manual": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "vortices": {"num": 40, "batch_rows": 8},
    "mazes": {"num": 80, "batch_rows": 8},
    "body": {"num": 60, "batch_rows": 8},
    "icons": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "tomography": {"num": 60, "batch_rows": 8},
    "carries": {"num": 60, "batch_rows": 8},
    "drawing": {"num": 60, "batch_rows": 8},
    "context": {"num": 60, "batch_rows": 8},
    "bars": {"num": 60, "batch_rows": 8},
    "quotes": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "charges": {"num": 60, "batch_rows": 8},
    "clusters": {"num": 60, "batch_rows": 8},
    "webster": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "codes": {"num": 60, "batch_rows": 8},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few rows of each set."""
    return write_sets(tmp_path, SMALL, monkeypatch)


@pytest.mark.parametrize("name", sorted({entry.task_name for entry in ENTRIES if entry.half in "DEFGHIJ"}))
def test_task_keeps_the_contract(name: str, data: Path) -> None:
    task: Any = TASKS[name](data, **SIZES.get(name, {"batch_rows": 8}))
    model = task.build(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), task.build(0).parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), task.build(1).parameters(), strict=True))
    grouped = [name for names in task.groups(model).values() for name in names]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())
    first, again = (task.gather(task.rows(3, seed=1)) for _ in range(2))
    assert all(torch.equal(a, b) and len(a) == task.batch_rows for a, b in zip(first, again, strict=True))
    assert task.rows(0).max() < task.num_train <= task.validation_rows.min()
    loss = task.loss(model, first)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert math.isfinite(task.evaluate(model)["loss"])
    (result,) = sweep(task, [Run(lr=1e-3, schedule="wsd")], optimizer="adam", num_steps=2)
    assert math.isfinite(result.validation["loss"]), "models train on the stacked engine"


def test_what_is_to_be_learned() -> None:
    numbers, wanted = half_d.SortingTask(num=3000).gather(torch.arange(200))
    assert 0.9 < (numbers.sort(-1).values == wanted).float().mean() < 1
    inputs, total = half_d.AddingTask(num=3000).gather(torch.arange(200))
    assert torch.all(inputs[..., 1].sum(-1) == 2)
    assert (total - inputs.prod(-1).sum(-1)).std() == pytest.approx(0.1, rel=0.2)
    bits, odd = half_d.ParityTask(num=5000).gather(torch.arange(1000))
    assert (bits[:, :4].prod(-1) == 1 - 2 * odd).float().mean() == pytest.approx(0.9, abs=0.04)
    pictures, disc = half_d.MasksTask(num=40).gather(torch.arange(40))
    assert pictures[disc].mean() - pictures[~disc].mean() == pytest.approx(1, abs=0.1)


def test_what_is_to_be_learned_in_half_e() -> None:
    pictures, kind, boxes = half_e.BoxesTask(num=200).gather(torch.arange(160))
    down, across, height, width = (boxes * 32).unbind(1)
    assert torch.all((down - height >= 0) & (down + height <= 32) & (across - width >= 0) & (across + width <= 32))
    rows, columns = down.round().long().clamp(0, 31), across.round().long().clamp(0, 31)
    assert pictures[torch.arange(160), rows, columns].mean() == pytest.approx(1, abs=0.25)
    assert set(kind.tolist()) == {0, 1, 2}
    (path,) = half_e.PendulumTask(num=50).gather(torch.arange(40))
    a, b, da, db = path.double().unbind(-1)
    energy = da**2 + db**2 / 2 + da * db * (a - b).cos() - 9.81 * (2 * a.cos() + b.cos())
    assert (energy - energy[:, :1]).abs().max() < 1e-2, "a double pendulum keeps its energy"
    points, shape = half_e.CloudsTask(num=600).gather(torch.arange(480))
    assert points[shape == 0].norm(dim=-1).mean() == pytest.approx(1, abs=0.05), "the first is a sphere"


def test_digits_that_are_compared(data: Path) -> None:
    task = half_f.SiameseTask(data)
    rows = torch.arange(40)
    assert task.others[:40].max() < 40 <= task.others[40:].min(), "no digit is on both sides"
    images, others, same = task.gather(rows)
    assert torch.equal(others, half_f.DigitsTask.gather(task, task.others[:40])[0])
    assert torch.equal(same, task.tensors[1][rows] == task.tensors[1][task.others[:40]])
    labels = RNG.integers(0, 10, 4000)
    assert (labels == labels[half_f.partners(labels, 0)]).mean() == pytest.approx(0.55, abs=0.03)
    assert images.max() == 1


def test_derivatives_of_a_field() -> None:
    torch.manual_seed(0)
    field, points = half_f.Field().double(), torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    value, place, time, bent = field(points)
    (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points)
    assert torch.allclose(first, torch.stack([place, time], -1))
    assert torch.allclose(second[:, 0], bent)


def test_long_convolution_is_a_sum_over_what_came_before() -> None:
    torch.manual_seed(0)
    layer, series = half_f.StateSpace(3), torch.randn(2, 3, 12)
    pulse = torch.zeros(1, 3, 12)
    pulse[..., 0] = 1
    kernel = layer(pulse)[0] - layer.direct * pulse[0]
    past = [(series[..., : end + 1] * kernel[:, : end + 1].flip(-1)).sum(-1) for end in range(12)]
    assert torch.allclose(layer(series), torch.stack(past, -1) + layer.direct * series, atol=1e-5)


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """The model, without a weight that is zero."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(
    "model",
    [
        half_f.ModernGpt(16, 2, 2),
        half_f.Retention(16, 2, 2),
        half_g.Manual(16, 2, 2),
        half_h.Window(16, 1),
        half_i.Looped(10, 16, 3),
        drawn(half_j.Lexicon(128, 16, 2, 2)),
    ],
)
def test_no_symbol_sees_a_later_one(model: torch.nn.Module) -> None:
    symbols = torch.from_numpy(RNG.integers(0, 128, (2, 10)))
    changed = symbols.clone()
    changed[:, 6:] = 5
    assert torch.allclose(model(symbols)[:, :6], model(changed)[:, :6], atol=1e-5)


def test_both_ways_sees_both_ways() -> None:
    torch.manual_seed(0)
    model, letters = half_f.BothWays(), torch.from_numpy(RNG.integers(0, 128, (2, 7)))
    changed = letters.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 128
    assert torch.all((model(letters) != model(changed)).any(-1)), "a letter matters to all others"


def test_quantiles_and_costs(data: Path) -> None:
    task = half_f.BaseballTask(data)
    *seen, runs = task.gather(torch.arange(40))
    wanted = torch.quantile(runs, torch.tensor(task.QUANTILES))

    def loss(found: torch.Tensor) -> float:
        return float(task.loss(lambda *_: found.expand(40, -1), (*seen, runs)))

    assert loss(wanted) < min(loss(wanted + 5), loss(wanted - 5))
    states, cost = half_f.ControlTask(num=4000).gather(torch.arange(3000))
    upright = (states[:, 0] > 0.95) & (states[:, 2].abs() < 1)
    assert cost[upright].mean() < cost.mean() / 2, "who stands has little to pay"


def test_selective_states_are_a_recurrence() -> None:
    torch.manual_seed(0)
    layer, x = half_g.Selective(8, 2, 4), torch.randn(1, 6, 8)
    with torch.no_grad():
        gate, mixed, steps = torch.split(layer.parts(layer.norm(x)), [16, 24, 2], -1)
        mixed = torch.nn.functional.silu(layer.near(mixed.transpose(1, 2))[..., :6].transpose(1, 2))
        value, key, query = torch.split(mixed, [16, 4, 4], -1)
        steps, state, found = torch.nn.functional.softplus(steps + layer.step), torch.zeros(2, 4, 8), []
        for place in range(6):
            here, step = value[0, place].view(2, 1, 8), steps[0, place].view(2, 1, 1)
            fade = (-step * layer.fade.exp().view(2, 1, 1)).exp()
            state = fade * state + step * key[0, place].view(1, 4, 1) * here
            found.append(((query[0, place].view(1, 1, 4) @ state) + here * layer.direct.unsqueeze(-1)).flatten())
        wanted = x + layer.out(layer.last(torch.stack(found).unsqueeze(0) * torch.nn.functional.silu(gate)))
        assert torch.allclose(layer(x), wanted, atol=1e-5)


def test_lemmas_end_where_they_end(data: Path) -> None:
    task = half_g.LemmasTask(data)
    letters, lemmas = task.gather(torch.arange(8))
    found = torch.randn(8, 15, 27)
    other = found.clone()
    other[:, 10:] = 0  # the nine letters and the end are asked, what comes then is not
    assert task.loss(lambda *_: found, (letters, lemmas)) == task.loss(lambda *_: other, (letters, lemmas))
    other[:, 9] = 0
    assert task.loss(lambda *_: found, (letters, lemmas)) != task.loss(lambda *_: other, (letters, lemmas))


def test_hazards_are_deaths_over_years(data: Path) -> None:
    task = half_g.SurvivalTask(data)
    numbers, spent, deaths = task.gather(torch.arange(48))
    assert spent.sum(-1).max() <= 20
    assert torch.all(spent[deaths > 0] > 0)
    best = (deaths.sum() / spent.sum()).log().expand(48, 10)

    def loss(found: torch.Tensor) -> float:
        return float(task.loss(lambda _: found, (numbers, spent, deaths)))

    assert loss(best) < min(loss(best + 0.1), loss(best - 0.1))


def test_no_hour_is_in_both_parts(data: Path) -> None:
    task = half_g.DemandTask(data)
    hours, last = task.tensors[0], task.num_train - 1
    whole = half_g.standardised(packages.read_arrays("demand", data)["hours"])
    assert torch.equal(hours[last], whole[last : last + 192])
    assert torch.equal(hours[last + 1], whole[last + 193 : last + 385])


def test_vortices_keep_their_energy() -> None:
    place = np.arange(32) / 32 * 2 * np.pi
    wave = (np.cos(place[:, None] + 2 * place) * 3)[None]
    kept = half_g.stirred(wave, time=0.5, num_steps=10, viscosity=0)
    assert np.allclose(kept, wave, atol=1e-6), "a single wave stands"
    faded = half_g.stirred(wave, time=0.5, num_steps=10, viscosity=1e-3)
    assert np.allclose(faded, wave * np.exp(-0.5e-3 * 5 * (2 * np.pi) ** 2), atol=1e-6)
    before, after = half_g.VorticesTask(num=40).gather(torch.arange(32))
    assert 0.5 < after.square().mean() / before.square().mean() < 1


def test_a_maze_has_a_shortest_way() -> None:
    free = np.array([[[1, 1, 1], [0, 0, 1], [1, 1, 1]]], dtype=bool)
    goal = np.zeros_like(free)
    goal[0, 2, 0] = True
    assert half_g.distances(free, goal, 20)[0].tolist() == [[6, 5, 4], [20, 20, 3], [0, 1, 2]]
    planes, move = half_g.MazesTask(num=400).gather(torch.arange(200))
    assert torch.all(planes[:, 1:].sum((-2, -1)) == 1)
    steps = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])[move]
    (_, y, x), padded = planes[:, 1].nonzero().T, torch.nn.functional.pad(planes[:, 0].float(), (1, 1, 1, 1))
    free_there = padded[torch.arange(200), y + 1 + steps[:, 0], x + 1 + steps[:, 1]]
    assert 0.9 < free_there.mean() < 1, "moves go where there is a way, but for a few"


def test_grids_are_linear_between_their_points() -> None:
    torch.manual_seed(0)
    model = half_g.Grids()
    model.head = torch.nn.Sequential(torch.nn.Linear(8, 1))
    ends = torch.tensor([[0.25, 0.5, 0.75], [0.25, 0.53125, 0.75]])  # neighbours on the finest
    middle = torch.lerp(ends[0], ends[1], 0.4).unsqueeze(0)
    first, second = model(ends)
    assert torch.allclose(model(middle), torch.lerp(first, second, 0.4), atol=1e-6)


def test_words_are_divided_where_a_number_is_odd() -> None:
    patterns = {"a": [0, 1], "bc": [0, 2, 0], "ab": [0, 1, 0], "d.": [0, 3, 0]}
    assert packages.division("aabcd", patterns, 2) == [0, 0, 1, 0, 0], "no part is a single letter"
    assert packages.division("xabcxx", {**patterns, "abc": [0, 0, 3, 0]}, 3) == [0, 0, 1, 1, 0, 0]


def test_letters_after_the_end_of_a_word_do_not_count(data: Path) -> None:
    task = half_h.HyphensTask(data)
    letters, breaks = task.gather(torch.arange(8))
    letters[:, 12:] = 0
    found = torch.randn(8, 20)
    other = found.clone()
    other[:, 12:] = 0
    assert task.loss(lambda _: found, (letters, breaks)) == task.loss(lambda _: other, (letters, breaks))
    torch.manual_seed(0)
    model, names = half_h.Triples(8), torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 3, 0, 0, 0]])
    vectors = model.triples.weight[torch.tensor([(1 * 39 + 2) * 39 + 3, (2 * 39 + 3) * 39 + 4])]
    wanted = model.head(torch.stack([vectors.mean(0), vectors[0]]))
    assert torch.allclose(model(names), wanted, atol=1e-6)


def test_the_inside_of_an_outline() -> None:
    corners = np.array([[0, 0], [4, 0], [4, 4], [2, 1], [0, 4]])  # with a dent from above
    edges = np.stack([corners, np.roll(corners, -1, axis=0)], 1)
    places = np.array([[0.5, 2], [2, 3], [2, 0.5], [3.5, 1], [5, 1], [1, -1]])
    assert packages.inside(places, edges).tolist() == [True, False, True, True, False, False]


def test_bumps_are_spread_over_the_sphere() -> None:
    model = half_h.Bumps()
    with torch.no_grad():
        model.heights.weight.fill_(1)
        places = torch.nn.functional.normalize(half_d.normal(0, 500, 3), dim=-1)
        found = model(places)
    assert found.std() / found.mean() < 0.05
    assert found.mean() == pytest.approx(1024 / (2 * 150), rel=0.05), "what a bump takes of a sphere"


def test_rays_cross_ellipses() -> None:
    disc = np.array([[[0.2, 0.0, 0.5, 0.5, 0.3, 2.0]]])
    found = half_h.chords(disc, np.array([0, np.pi / 2]), np.array([0.0, 0.2]))
    assert np.allclose(found[0], 2 * np.array([[2 * np.sqrt(0.25 - 0.04), 1], [1, 2 * np.sqrt(0.25 - 0.04)]]))
    rays, pictures = half_h.TomographyTask(num=40).gather(torch.arange(32))
    sums = pictures.view(-1, 24, 24).sum(1) / 12  # down, which is along the first rays
    assert (rays.view(-1, 24, 24)[:, 0] - sums).abs().mean() < 0.06


def test_sums_and_drawings() -> None:
    digits, total = half_h.CarriesTask(num=600).gather(torch.arange(400))
    numbers = (digits * 10 ** torch.arange(12)[:, None]).sum((1, 2))
    wanted = numbers[:, None] // 10 ** torch.arange(12) % 10
    assert (total == wanted).float().mean() == pytest.approx(0.955, abs=0.02)
    numbers, pictures = half_h.DrawingTask(num=60).gather(torch.arange(40))
    for across, up in (numbers[:, :2].unbind(1), numbers[:, 7:9].unbind(1)):
        column, row = (((place + 1) * 16).long() for place in (across, up))
        assert torch.all(pictures[torch.arange(40), row, column] > 0.9), "shapes are where the numbers say"
    assert pictures.mean() < 0.3


def test_an_answer_is_seen_only_after_it() -> None:
    torch.manual_seed(0)
    inputs, answers = half_h.ContextTask(num=50).gather(torch.arange(4))
    model, changed = half_h.Learner(4, 16), answers.clone()
    changed[:, 6] += 1
    found, other = model(inputs, answers), model(inputs, changed)
    assert torch.allclose(found[:, :7], other[:, :7], atol=1e-6)
    assert torch.all(found[:, 7:] != other[:, 7:])


def test_a_bar_that_is_heated_evenly() -> None:
    x = np.linspace(0, 1, 129)
    assert np.allclose(half_h.warmth(np.full((1, 128), 2.0), np.full((1, 128), 4.0)), x * (1 - x), atol=1e-12)
    _, places, warm = half_h.BarsTask(num=200).gather(torch.arange(160))
    assert torch.all(warm[(places == 0) | (places == 1)] == 0)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.half in "IJ"], ids=lambda entry: entry.name)
def test_a_fixed_rate_is_what_torch_makes_of_it(entry: Entry, data: Path) -> None:
    task: Any = TASKS[entry.task_name](data, **SIZES.get(entry.task_name, {"batch_rows": 8}))
    model, run = task.build(0), Run(lr=1e-3, schedule="constant")
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9)
    for step in range(3):
        loss = task.loss(model, task.gather(task.rows(step, seed=0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (result,) = sweep(task, [run], optimizer="sgd", num_steps=3)
    assert result.validation["loss"] == pytest.approx(task.evaluate(model)["loss"], rel=1e-4)


def test_a_point_is_not_seen_before_it_is_drawn() -> None:
    torch.manual_seed(0)
    model, points = half_i.Printer(8, 2), (torch.rand(2, 1, 16, 16) < 0.5).float()
    changed = points.clone()
    changed[:, :, 7, 5] = 1 - changed[:, :, 7, 5]
    found, other = (model(seen).flatten(1) for seen in (points, changed))
    place = 7 * 16 + 5
    assert torch.equal(found[:, : place + 1], other[:, : place + 1])
    assert torch.all(found[:, place + 1] != other[:, place + 1])


def test_slips_of_a_typist() -> None:
    def letters(*words: str) -> np.ndarray:
        return np.array([[ord(letter) - 96 for letter in word] + [0] * (8 - len(word)) for word in words])

    def text(row: np.ndarray) -> str:
        return "".join(chr(96 + letter) for letter in row if letter)

    found = {text(row) for row in half_i.mistyped(letters(*["abc"] * 4000), 0)}
    alphabet = [chr(97 + place) for place in range(26)]
    wrong = {word[:place] + letter + word[place + 1 :] for word in ["abc"] for place in range(3) for letter in alphabet}
    longer = {"abc"[:place] + letter + "abc"[place:] for place in range(3) for letter in alphabet}
    assert found == wrong | longer | {"bc", "ac", "ab"} | {"bac", "acb"}
    assert half_i.mistyped(letters("abcdefgh"), 0).shape == (1, 9), "there is room for one letter more"


def test_deviance_is_least_at_the_mean() -> None:
    visits = torch.tensor([0.0, 1.0, 5.0])

    def loss(mean: float) -> float:
        task: Any = half_i.VisitsTask
        return float(task.loss(None, lambda _: torch.full((3, 1), math.log(mean)), (torch.zeros(3, 1), visits)))

    assert 0 < loss(2) < min(loss(1.8), loss(2.2))


def test_a_tone_is_loud_in_its_band() -> None:
    tone = 8000 * np.sin(2 * np.pi * 1000 / 8000 * np.arange(128 * 17))
    found = packages.loudness(np.round(tone)[None].astype("<i2"))
    assert found.shape == (1, 16, 24)
    assert np.all(found.argmax(-1) == 15), "1000 Hz is step 32 of 31.25 Hz, in the band that begins at 29"
    louder = packages.loudness(np.round(2 * tone)[None].astype("<i2"))
    assert np.all(louder.max(-1) - found.max(-1) == 2), "twice as high is 6 dB"


def test_charges_of_one_sign_part() -> None:
    places, charges, force = half_i.ChargesTask(num=4000).gather(torch.arange(3000))
    assert (force.sum(1) / math.sqrt(6)).std() == pytest.approx(0.3, abs=0.01), "but for noise they add up to nothing"
    outward = (places * force).sum((1, 2))
    alike = (charges.sign().sum(1).abs() == 6).nonzero().squeeze(-1)
    assert outward[alike].mean() > outward.mean() + 1


def test_clusters_that_are_known_cost_least() -> None:
    task = half_i.ClustersTask(num=2000)
    (points,) = task.gather(torch.arange(100))
    known = torch.cat([torch.zeros(4, 1), torch.tensor([[-2.0, -2], [-2, 2], [2, -2], [2, 2]]), torch.zeros(4, 1)], 1)
    points = known[half_d.integers(0, 4, 100, 40)][..., 1:3] + half_d.normal(1, 100, 40, 2)

    def loss(parts: torch.Tensor) -> float:
        return float(task.loss(lambda _: parts.expand(100, -1, -1), (points,)))

    grown = known + torch.tensor([0, 0, 0, 0.3])
    moved = known + torch.tensor([0, 0.5, 0, 0])
    assert loss(known) < min(loss(grown), loss(moved))
    assert loss(known[[2, 0, 3, 1]]) == pytest.approx(loss(known)), "in whatever order"


def _archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def test_what_is_kept_of_packages() -> None:
    def arrays(name: str, files: dict[str, bytes]) -> dict[str, Any]:
        return packages.SETS[name](lambda _: _archive(files))

    tune = b"X:1\nT: A tune\nM: 2/4\nL:1/8\nK:G\nAB | c2\nw: la la\nd2 |]\n\n"
    other = b"X:1\nK:C\nA\n"
    found = arrays("tunes", {"m/essen/a.abc": tune + tune.replace(b"X:1", b"X:2"), "m/josquin/b.abc": other})
    assert found["text"].tobytes() == b"M:2/4\nL:1/8\nK:G\nAB | c2\nd2 |]\n\n", "a tune is kept once"
    pen = json.dumps({"strokes": [], "medians": [[[0, 5], [3, 9]], [[1, 1]]]}).encode()
    found = arrays("hanzi", {"package/x.json": pen})
    assert found["moves"][0, :3].tolist() == [[0, 0], [3, 4], [-2, -8]]
    assert found["lifts"][0, :4].tolist() == [2, 1, 1, 0]
    lines = b'  1 licence\n00001740 03 n 01 living_thing 0 000 | a living thing; "an example"\n'
    found = arrays("wordnet", {f"package/dict/data.{kind}": lines for kind in ("noun", "verb", "adj", "adv")})
    assert found["words"].tolist() == [[1, 2, 3] + [0] * 13] * 4
    assert found["letters"][0, :8].tolist() == [12, 9, 22, 9, 14, 7, 27, 20]
    lines = b"00000001 05 n 01 a 0 002 @ 00000002 n 0000 ~ 00000002 n 0000 | x\n00000002 07 n 02 b 0 c 0 000 | y\n"
    empty = {f"package/dict/data.{kind}": b"" for kind in ("verb", "adj", "adv")}
    found = arrays("senses", {"package/dict/data.noun": lines, **empty})
    assert found["links"].tolist() == [[1, 0, 0, 0, 0], [1] * 5]
    assert found["fields"].tolist() == [5, 7]


def test_what_is_kept_of_translations() -> None:
    text = (
        'msgid ""\nmsgstr ""\n"Language: x"\n\nmsgid "a"\nmsgstr "Hier \\"so\\" "\n"gut"\n\nmsgid "b"\nmsgstr "kurz"\n'
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr("django/conf/locale/de/LC_MESSAGES/django.po", text)
    found = packages.SETS["languages"](lambda _: packed.getvalue())
    assert [bytes(row).rstrip(b"\0") for row in found["letters"]] == [b'Hier "so" gut']
    assert found["languages"].tolist() == [0]


def test_a_pickle_of_plain_values_runs_nothing() -> None:
    assert packages.PlainValues(io.BytesIO(pickle.dumps({"amat": "amo"}))).load() == {"amat": "amo"}
    with pytest.raises(pickle.UnpicklingError, match="must have no pathlib"):
        packages.PlainValues(io.BytesIO(pickle.dumps(Path("x")))).load()


def test_experts_are_two_and_even_use_costs_least() -> None:
    torch.manual_seed(0)
    layer = half_e.Experts(8)
    found, uneven = layer(torch.randn(4, 6, 8))
    assert found.shape == (4, 6, 8)
    assert uneven.item() == pytest.approx(1, abs=0.2)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.arange(8.0)[:, None] * torch.ones(8))
    assert layer(torch.rand(4, 6, 8) + 1)[1] > 3


def test_density_is_one() -> None:
    flow = half_d.DensityTask(num=5000).build(0)
    points = half_d.normal(0, 20_000, 8) * 2
    proposal = -points.square().sum(-1) / 8 - 8 * math.log(2 * math.sqrt(2 * math.pi))
    with torch.no_grad():
        assert (flow(points) - proposal).exp().mean() == pytest.approx(1, abs=0.1)


def test_numbers_are_the_same_everywhere() -> None:
    assert half_d.uniform(3, 2).tolist() == [0.0856491671436244, 0.23681050659609976]
    assert half_d.integers(3, 100, 2).tolist() == [8, 23]
    drawn = half_d.normal(3, 40_000)
    assert drawn.mean().item() == pytest.approx(0, abs=0.02)
    assert drawn.std().item() == pytest.approx(1, abs=0.02)


def test_half_d_is_run_around_the_optimizer_of_the_snippet() -> None:
    mine = [job for job in jobs(ENTRIES, METHODS) if job.entry.half == "D"]
    by_task = {entry: {job.method for job in mine if job.entry.name == entry} for entry in ("adding", "mixer-sgd")}
    assert {"grid", "autolr", "adamw", "greedy", "muon"} <= by_task["adding"]
    assert by_task["mixer-sgd"] == {"grid", "autolr"}


def test_a_word_is_seen_both_ways_and_sounds_one() -> None:
    torch.manual_seed(0)
    model, words = half_j.Sounds(8, 16, 2), torch.randint(1, 2048, (2, 6))
    kana, other_word = torch.randint(1, 87, (2, 8)), words.clone()
    other_kana = kana.clone()
    other_word[:, 5], other_kana[:, 4] = other_word[:, 5] % 2047 + 1, kana[:, 4] % 86 + 1
    found = model(words, kana)
    assert torch.all((found != model(other_word, kana)).any(-1)), "a character matters to all sounds"
    assert torch.allclose(found[:, :4], model(words, other_kana)[:, :4], atol=1e-6)
    assert torch.all((found != model(words, other_kana)).any(-1)[:, 4:])


def test_a_banner_begins_where_it_is_not_empty() -> None:
    found = packages.banner(["", "   #", "  ##  ", "   #", ""])
    assert found is not None
    assert found[:4, :3].tolist() == [[0, 3, 0], [3, 3, 0], [0, 3, 0], [0, 0, 0]]
    assert found.shape == (10, 16)
    assert found[:, 3:].sum() == 0
    assert packages.banner(["#" * 17]) is None
    assert packages.banner(["#"] * 11) is None
    assert packages.banner(["  ", ""]) is None


def test_a_margin_makes_the_right_letter_harder(data: Path) -> None:
    task = half_j.BannersTask(data)
    kinds, cosines = torch.tensor([3, 5]), torch.rand(2, 36)
    wanted = 16 * cosines
    wanted[[0, 1], kinds] -= 1.6
    loss = task.loss(lambda _: cosines, (torch.zeros(2, 10, 16), kinds))
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(wanted, kinds)))
    assert task.build(0)(task.tensors[0][:8]).abs().max() <= 1 + 1e-6


def test_births_are_negative_binomial(data: Path) -> None:
    task = half_j.BirthsTask(data)
    known = half_j.calendar(np.array([0, 7305]))
    assert known[:, 1:8].argmax(1).tolist() == [0, 4], "7305 days are 1043 weeks and 4 days"
    assert known[:, 16].tolist() == [-1, 1]
    births, logs, spread = torch.tensor([3.0, 80.0]), torch.tensor([1.2, 4.0]), torch.tensor([0.3, 0.05])
    found = torch.zeros(2, 19)
    found[:, 0], found[:, -1] = logs, torch.expm1(spread - 1e-3).log()
    size = 1 / spread
    counts: Any = torch.distributions.NegativeBinomial(size, logits=logs + spread.log())
    ones = torch.nn.functional.pad(torch.ones(2, 1), (0, 17))
    loss = task.loss(lambda _: found, (torch.zeros(2), ones, births))
    assert loss == pytest.approx(float(-counts.log_prob(births).mean()), rel=1e-4)


def test_marks_have_shares_that_add_up_to_one(data: Path) -> None:
    task = half_j.LecturesTask(data)
    model: Any = task.build(0)
    kinds, _ = task.gather(torch.arange(4))
    losses = [task.loss(model, (kinds[:1], torch.tensor([mark]))) for mark in range(5)]
    assert torch.stack(losses).neg().exp().sum().item() == pytest.approx(1, abs=1e-5)
    vectors = model.inputs(kinds)
    pairs = sum((vectors[:, a] * vectors[:, b]).sum(-1) for a in range(6) for b in range(a))
    assert torch.allclose(model(kinds)[:, 0], pairs + model.tokens(kinds).sum((1, 2)) - model.first, atol=1e-6)
    assert kinds.max() < task.num_kinds
    assert torch.all(model(kinds).diff(dim=-1) < 0)


def test_no_window_has_a_gap(data: Path) -> None:
    task = half_j.GlucoseTask(data)
    values = (torch.from_numpy(packages.read_arrays("glucose", data)["glucose"]).float() - 140) / 55
    windows = values.unfold(0, 60, 1)
    starts = [*range(41), *range(100, 261), *range(320, 341)]  # a gap before 100; what validates begins at 320
    assert torch.equal(task.tensors[0], windows[starts])
    assert task.num_train == 41 + 161


def test_a_spline_is_a_density() -> None:
    x = (torch.arange(200_000) + 0.5) / 200_000
    wide, high, slopes = (4 * half_d.normal(seed, 1, num).expand(len(x), -1) for seed, num in ((0, 6), (2, 6), (4, 7)))
    logs = half_j.spline_density(x, wide, high, slopes)
    assert logs.exp().mean() == pytest.approx(1, abs=1e-3)
    alike = torch.zeros(len(x), 6)
    flat = half_j.spline_density(x, alike, alike, torch.full((len(x), 7), 0.5413))
    assert flat.abs().max() < 2e-3, "where slopes are one and bins are alike nothing is changed"


def test_the_nearest_across_the_line_where_days_change(data: Path, tmp_path: Path) -> None:
    arrays = {**SMALL["heights"], "places": np.array([[0, 179.9], [0, -179.9], [1, 179.9]] * 20, dtype="f4")}
    arrays["near"] = np.ones((60, 8), dtype="u2")
    np.savez(tmp_path / "open" / "heights.npz", **arrays)
    seen, feet = half_j.HeightsTask(data).gather(torch.arange(3))
    assert torch.allclose(seen[0, 0, :2], torch.tensor([0, 0.2224]), atol=1e-3), "22 km to the east"
    assert torch.allclose(seen[2, 0, :2], torch.tensor([-1.1119, 0.2224]), atol=1e-3)
    assert torch.allclose(seen[:, 0, 3], feet[1] / 1000, atol=1e-4)


def test_three_weights_and_a_gradient_past_them() -> None:
    torch.manual_seed(0)
    layer: Any = half_j.Ternary(6, 5)
    seen = torch.eye(6) * 1e3
    layer.norm = torch.nn.Identity()
    found = (layer(seen) - layer.layer.bias).T / 1e3
    size = layer.layer.weight.abs().mean()
    assert torch.allclose(found, (layer.layer.weight / size).round().clamp(-1, 1) * size, atol=1e-5)
    layer(seen).sum().backward()
    assert layer.layer.weight.grad is not None
    assert torch.all(layer.layer.weight.grad == 1e3)


def test_few_codes_make_up_the_sums() -> None:
    task = half_j.CodesTask(num=4000)
    sums, codes = task.gather(torch.arange(3000))
    parts = torch.linalg.lstsq(codes.double(), sums.double()).solution
    assert (codes.double() @ parts - sums).std() == pytest.approx(0.02, rel=0.1)
    assert torch.allclose(parts.norm(dim=-1), torch.ones(32, dtype=torch.float64), atol=0.01)
    assert (codes != 0).float().mean() == pytest.approx(0.08, abs=0.01)
    model = half_j.Unrolled(2, 3)
    assert torch.allclose(model._shrunk(torch.tensor([0.05, 0.3, -0.3])), torch.tensor([0, 0.2, -0.2]))
