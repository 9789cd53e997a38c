from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hdet_lab.bench.suite import ENTRIES
from hdet_lab.models.gpt import GPT
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.optim import Adam
from hdet_lab.tasks import (
    TASKS,
    FashionTask,
    FeedTask,
    QuadraticTask,
    Task,
    TextTask,
    batch_of,
    load_task,
    shakespeare_gpt,
    split_rows,
    stdlib_gpt,
)
from hdet_lab.tasks.base import param_groups
from hdet_lab.tasks.feed import auc
from hdet_lab.tasks.feed_data import LIKED, PADDING, WATCHED, WATCHED_LONG
from small_tasks import (
    DOCS,
    SMALL,
    SMALL_TASKS,
    example_of_the_docs,
    small_fashion,
    write_fashion,
    write_feed,
    write_shakespeare,
)

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(params=list(SMALL_TASKS))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    made = SMALL_TASKS[request.param](tmp_path)
    assert made.name == request.param
    return made


def test_conforms(task: Task) -> None:
    state = torch.random.get_rng_state()
    model, same, other = task.build(1), task.build(1), task.build(2)
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    differ = any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert differ == (not task.name.startswith("finetune-gpt"))  # these start from one model

    named = [name for names in task.groups(model).values() for name in names]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    groups = param_groups(task, model)
    assert [g["name"] for g in groups] == list(task.groups(model))
    assert sum(len(g["params"]) for g in groups) == len(named)

    batch = batch_of(task, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(batch, batch_of(task, 3, seed=1), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(batch, batch_of(task, 4, seed=1), strict=True))
    loss = task.loss(model, batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    figures = task.evaluate(model)
    assert model.training
    expected = task.loss(model.eval(), task.gather(task.validation_rows)).item()
    assert next(iter(figures)) == "loss"
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert task.evaluate(model) == figures
    assert not model.training
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_replicas_share_one_global_batch(task: Task, num_replicas: int) -> None:
    rows = task.rows(2, seed=5)
    parts = split_rows(rows, num_replicas)
    assert sorted(parts.flatten().tolist()) == sorted(rows.tolist())
    for replica in range(num_replicas):
        mine = batch_of(task, 2, seed=5, replica=replica, num_replicas=num_replicas)
        assert all(torch.equal(a, b) for a, b in zip(mine, task.gather(parts[replica]), strict=True))
    stacked = task.gather(parts)
    assert all(t.shape[:2] == parts.shape for t in stacked)
    assert torch.equal(stacked[0][-1], task.gather(parts[-1])[0])


def test_loss_of_the_parts_averages_to_the_whole(task: Task) -> None:
    model = task.build().double().eval()  # BatchNorm sees no batch
    parts = [task.loss(model, batch_of(task, 1, replica=r, num_replicas=4)).item() for r in range(4)]
    assert np.mean(parts) == pytest.approx(task.loss(model, batch_of(task, 1)).item(), rel=1e-12)


def test_split_needs_a_divisor() -> None:
    with pytest.raises(ValueError, match=r"num_replicas \(5\) must divide the 12 rows"):
        split_rows(torch.arange(12), 5)


def test_text_keeps_validation_apart() -> None:
    task = TextTask("t", torch.arange(200) % 50, 50, **SMALL)
    last = max(int(task.rows(step).max()) for step in range(50))
    assert last + task.context < 180
    assert int(task.validation_rows.min()) == 180
    assert int(task.validation_rows.max()) + task.context == 199
    assert task.gather(torch.tensor([[3], [7]]))[0].tolist() == [[list(range(3, 12))], [list(range(7, 16))]]


def test_text_too_short() -> None:
    with pytest.raises(ValueError, match="must be longer than 1290 tokens, but got 1000"):
        TextTask("t", torch.zeros(1000), 2)


def test_stdlib_reads_sorted_files_and_skips_tests(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b" * 60)
    (tmp_path / "a.py").write_text("a" * 60)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c.py").write_text("c" * 60)
    assert bytes(stdlib_gpt(tmp_path, max_bytes=110, **SMALL).text.tolist()) == b"a" * 60 + b"b" * 50


def test_stdlib_without_source(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python source in"):
        stdlib_gpt(tmp_path)


def test_shakespeare_checks_what_it_reads(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"input\.txt is missing; get it from https"):
        shakespeare_gpt(tmp_path, download=False)
    write_shakespeare(tmp_path)
    with pytest.raises(ValueError, match="must have the SHA-256 86c4"):
        shakespeare_gpt(tmp_path)
    task = shakespeare_gpt(tmp_path, sha256=None, **SMALL)
    assert task.vocabulary == len(set("to be or not to be, that is the question\n"))


def test_default_gpt_has_the_protocol_size() -> None:
    assert sum(p.numel() for p in GPT(65).parameters()) == 820_608


def test_feed_is_one_epoch_in_time_order(tmp_path: Path) -> None:
    write_feed(tmp_path)
    task = FeedTask(tmp_path, batch_rows=12)
    assert task.total_steps == 200 // 12
    assert task.validation_rows.tolist() == list(range(200, 400))
    rows = torch.cat([task.rows(step) for step in range(task.total_steps)])
    assert rows.tolist() == list(range(192))
    with pytest.raises(ValueError, match=r"step must be in \[0, 16\), one epoch, but got step=16"):
        task.rows(16)
    assert list(task.groups(task.build())) == ["embedding", "no_decay", "non_embedding", "transformer"]
    assert set(task.evaluate(task.build())) == {
        "loss",
        *(f"{kind}/{label}" for kind in ("ne", "auc") for label in ("is_click", "long_view", "is_like")),
    }


def test_feed_histories_are_padded_in_front(tmp_path: Path) -> None:
    write_feed(tmp_path)
    data = FeedTask(tmp_path, batch_rows=12, history=3).data
    assert data.past[2].tolist() == [11, 1, 2]
    assert data.behaviour[2].tolist() == [PADDING, WATCHED, LIKED]
    assert data.past[5].tolist() == [4, 5, 6]
    assert data.behaviour[5].tolist() == [WATCHED, WATCHED, WATCHED_LONG]
    assert data.past[0].tolist() == [11, 11, 11]
    fields = data.fields
    assert (fields.min(0).values[1:] > fields.max(0).values[:-1]).all()
    assert int(fields.max()) < data.num_values


def test_feed_ignores_padding(tmp_path: Path) -> None:
    write_feed(tmp_path)
    task = FeedTask(tmp_path, batch_rows=12, history=3, width=8)
    model = task.build()
    fields, item, past, behaviour, _ = batch_of(task, 0)
    changed = torch.where(behaviour == PADDING, torch.zeros_like(past), past)
    assert not torch.equal(changed, past)
    torch.testing.assert_close(model(fields, item, changed, behaviour), model(fields, item, past, behaviour))


def test_auc() -> None:
    assert auc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0])) == 1.0
    assert auc(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.0, 0.0, 1.0])) == 0.5
    assert auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])) == pytest.approx(0.875)


def test_fashion_reads_idx_files(tmp_path: Path) -> None:
    task = small_fashion(tmp_path)
    assert task.num_train == 40
    assert task.validation_rows.tolist() == list(range(40, 50))
    content = gzip.decompress((tmp_path / "fashion-mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    images, _ = task.gather(torch.tensor([41]))
    assert bytes(images.flatten().tolist()) == content[16 + 784 : 16 + 2 * 784]
    labels = gzip.decompress((tmp_path / "fashion-mnist" / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert task.gather(torch.arange(40))[1].tolist() == list(labels)


def test_fashion_checks_what_it_reads(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz is missing; get it from https"):
        FashionTask(tmp_path, download=False)
    write_fashion(tmp_path)
    with pytest.raises(ValueError, match="must have the SHA-256 c59f"):
        FashionTask(tmp_path)
    path = tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(ValueError, match="must hold an IDX array of bytes, but its header says 000008010000000a"):
        FashionTask(tmp_path, check=False)


def test_fashion_shifts_and_mirrors(tmp_path: Path) -> None:
    task = small_fashion(tmp_path)
    rows = torch.cat([task.rows(step) for step in range(300)])
    assert int((rows % 50).max()) == 39  # no test image is trained on
    assert set((rows // 50).tolist()) == set(range(50))
    variants = task.gather(3 + 50 * torch.arange(50))[0]
    plain = variants[0]
    assert any(torch.equal(v[2:, :-1], plain[:-2, 1:]) and not v[:2].any() for v in variants)  # two down, one left
    assert torch.equal(variants[25], plain.flip(1))
    assert len({bytes(v.flatten().tolist()) for v in variants}) == 50
    unchanged = FashionTask(tmp_path, check=False, augment=False)
    assert max(int(unchanged.rows(step).max()) for step in range(20)) < 40


@pytest.mark.skipif(not (DATA / "fashion-mnist").exists(), reason="data/fashion-mnist is not there")
def test_fashion_itself() -> None:
    task = FashionTask(DATA, download=False)
    assert (task.num_train, len(task.validation_rows)) == (60_000, 10_000)
    assert task.labels[task.validation_rows].bincount().tolist() == [1000] * 10
    assert sum(p.numel() for p in task.build().parameters()) == 223_658
    assert task.loss(task.build(), batch_of(task, 0)).item() == pytest.approx(2.3, abs=1.0)


def test_quadratic_is_what_it_says() -> None:
    task = QuadraticTask(dimension=5, condition=16, noise=0.3, batch_rows=4, num_rows=100)
    assert task.eigenvalues.tolist() == pytest.approx([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])
    draws = task.draws[:-1]
    assert draws.mean(0).abs().max() < 1e-6
    assert draws.std(0, correction=0).tolist() == pytest.approx([0.3] * 5)
    model = task.build(3)
    offset = (model() - task.optimum).detach()
    excess = 0.5 * (task.eigenvalues * offset**2).sum().item()
    assert task.evaluate(model) == pytest.approx({"loss": excess, "distance": offset.norm().item()})
    rows = torch.tensor([3, 8, 8])
    task.loss(model, task.gather(rows)).backward()  # type: ignore[no-untyped-call]
    (theta,) = model.parameters()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, task.eigenvalues * offset + draws[rows].mean(0))
    again = QuadraticTask(dimension=5, noise=0.6, num_rows=100)
    torch.testing.assert_close(again.draws, 2 * task.draws)
    assert not torch.allclose(QuadraticTask(dimension=5, noise=0.3, num_rows=100, seed=1).draws, task.draws)


def test_quadratic_starts_away_from_the_optimum() -> None:
    for seed in range(3):
        task = QuadraticTask(dimension=400, num_rows=10, seed=seed)
        for start in range(3):
            assert task.evaluate(task.build(start))["distance"] == pytest.approx(800**0.5, rel=0.15)


def test_quadratic_arguments() -> None:
    with pytest.raises(ValueError, match=r"condition must be at least 1 .* but got condition=0\.5 and noise=1\.0"):
        QuadraticTask(condition=0.5)
    with pytest.raises(ValueError, match=r"dimension must be at least 1 .* but got dimension=0 and num_rows=65536"):
        QuadraticTask(dimension=0)


def test_ten_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT(65, context=256, num_layers=6, width=384, num_heads=6)
    assert sum(p.numel() for p in model.parameters()) == 10_770_048


def test_load_task(tmp_path: Path) -> None:
    elsewhere = {entry.task_name for entry in ENTRIES if entry.half in "CDEFGHIJ"}  # tests of their own
    assert set(TASKS) - elsewhere == set(SMALL_TASKS) - {"wave"}, "a new task needs a small instance for the tests"
    task = load_task("quadratic", dimension=3, batch_rows=5)
    assert isinstance(task, QuadraticTask)
    assert (task.batch_rows, len(task.optimum)) == (5, 3)
    write_shakespeare(tmp_path)
    large = load_task("shakespeare-gpt-10m", tmp_path, sha256=None, context=8)
    assert isinstance(large, TextTask)
    assert (large.context, large.sizes) == (8, {"num_layers": 6, "width": 384, "num_heads": 6})
    with pytest.raises(FileNotFoundError, match=r"log\.npz is missing; the data are KuaiRand-Pure"):
        load_task("feed", tmp_path)
    with pytest.raises(ValueError, match=f"task must be one of {', '.join(TASKS)}, or MODULE:CLASS, but got 'mnist'"):
        load_task("mnist")


def test_the_docs_name_every_task() -> None:
    table = re.findall(r"^\| (`.*?) \|", DOCS.read_text(), re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`([\w-]+)`", cell)}
    assert named >= set(TASKS)


def test_the_example_of_the_docs_trains() -> None:
    names = example_of_the_docs()
    assert [result.run for result in names["results"]] == names["runs"]
    start = names["WaveTask"]().evaluate(names["WaveTask"]().build())["loss"]
    assert all(result.validation["loss"] < 0.7 * start for result in names["results"])


def test_tasks_run_stacked(task: Task) -> None:
    """Every operation of a task's model has a batching rule (vmap warns otherwise), and runs do not mix."""
    models = [task.build(seed) for seed in range(2)]
    engine = StackedModels(models, task.loss, task.groups(models[0]), num_replicas=3, optimizer=Adam())
    rows = torch.stack([split_rows(task.rows(step), 3) for step in range(2)])
    lrs = torch.full((2, 3, len(engine.group_names)), 1e-3)
    result = engine.step(task.gather(rows), lrs)
    for run, model in enumerate(models):
        expected = [task.loss(model, task.gather(part)).item() for part in rows[run]]
        assert result.losses[run].tolist() == pytest.approx(expected, rel=1e-5)
    validation = [task.gather(part) for part in torch.split(task.validation_rows, 7)]
    figures = engine.evaluate(validation)
    for run in range(2):
        assert task.evaluate(engine.mean_model(run))["loss"] == pytest.approx(figures[run].item(), rel=1e-5)
