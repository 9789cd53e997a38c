from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdet.lab.gpt import GPT
from hdet.lab.stacked import StackedModels
from hdet.lab.stacked_optim import Adam
from hdet.lab.tasks import FeedTask, Task, TextTask, load_task, shakespeare_gpt, split_rows, stdlib_gpt
from hdet.lab.tasks.base import param_groups
from hdet.lab.tasks.feed import auc
from hdet.lab.tasks.feed_data import LIKED, PADDING, WATCHED, WATCHED_LONG

SMALL: dict[str, Any] = {
    "context": 8,
    "num_layers": 1,
    "width": 8,
    "num_heads": 2,
    "batch_rows": 12,
    "num_validation": 20,
}


def write_shakespeare(folder: Path) -> None:
    path = folder / "tinyshakespeare" / "input.txt"
    path.parent.mkdir()
    path.write_bytes(b"to be or not to be, that is the question\n" * 20)


def write_feed(folder: Path, *, num_rows: int = 400, num_users: int = 7, num_items: int = 11) -> None:
    random = np.random.default_rng(0)
    place = folder / "kuairand-pure"
    place.mkdir()
    log = {
        "user_id": random.integers(0, num_users, num_rows).astype(np.uint16),
        "video_id": random.integers(0, num_items, num_rows).astype(np.uint16),
        "time_ms_rel": np.sort(random.integers(0, 10**9, num_rows)).astype(np.uint32),
        "time_ms_base": np.array([1650812741436]),
        "date": np.repeat(20220425 + np.arange(8), num_rows // 8).astype(np.uint32),
        "tab": random.integers(0, 3, num_rows).astype(np.uint8),
        "duration_ms": random.integers(0, 10**5, num_rows).astype(np.uint32),
    }
    labels = {name: random.integers(0, 2, num_rows).astype(np.uint8) for name in ("is_click", "long_view", "is_like")}
    np.savez(place / "log.npz", **log, **labels)  # type: ignore[arg-type]
    user_fields = ["user_active_degree", "is_video_author", "is_live_streamer", "register_days_range"]
    user_fields += [f"{kind}_user_num_range" for kind in ("follow", "fans", "friend")]
    user_fields += [f"onehot_feat{i}" for i in range(18)]
    users = {name: random.integers(-1, 3, num_users) for name in user_fields}
    np.savez(place / "users.npz", user_id=np.arange(num_users), **users)  # type: ignore[arg-type]
    items = {name: random.integers(-1, 5, num_items) for name in ("tag_first", "video_type", "upload_type")}
    authors = random.integers(0, 10**6, num_items)
    np.savez(place / "items.npz", video_id=np.arange(num_items), author_id=authors, **items)  # type: ignore[arg-type]
    np.savez(
        place / "histories.npz",
        user_id=np.array([2, 5]),
        watch_seq=np.array([1, 2, 3, 4, 5, 6]),
        watch_seq_off=np.array([0, 2, 6]),
        like_seq=np.array([2]),
        like_seq_off=np.array([0, 1, 1]),
        long_watch_seq=np.array([6]),
        long_watch_seq_off=np.array([0, 0, 1]),
    )


@pytest.fixture(params=["stdlib-gpt", "shakespeare-gpt", "feed"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    if request.param == "stdlib-gpt":
        return stdlib_gpt(max_bytes=20_000, **SMALL)
    if request.param == "shakespeare-gpt":
        write_shakespeare(tmp_path)
        return shakespeare_gpt(tmp_path, sha256=None, **SMALL)
    write_feed(tmp_path)
    return FeedTask(tmp_path, batch_rows=12, history=3, width=8)


def test_conforms(task: Task) -> None:
    state = torch.random.get_rng_state()
    model, same, other = task.build(1), task.build(1), task.build(2)
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    named = [name for names in task.groups(model).values() for name in names]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    groups = param_groups(task, model)
    assert [g["name"] for g in groups] == list(task.groups(model))
    assert sum(len(g["params"]) for g in groups) == len(named)

    batch = task.batch(3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(batch, task.batch(3, seed=1), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(batch, task.batch(4, seed=1), strict=True))
    loss = task.loss(model, batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    expected = task.loss(model, task.gather(task.validation_rows)).item()
    assert task.evaluate(model)["loss"] == pytest.approx(expected, rel=1e-5)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_replicas_share_one_global_batch(task: Task, num_replicas: int) -> None:
    rows = task.rows(2, seed=5)
    parts = split_rows(rows, num_replicas)
    assert sorted(parts.flatten().tolist()) == sorted(rows.tolist())
    for replica in range(num_replicas):
        mine = task.batch(2, seed=5, replica=replica, num_replicas=num_replicas)
        assert all(torch.equal(a, b) for a, b in zip(mine, task.gather(parts[replica]), strict=True))
    stacked = task.gather(parts)
    assert all(t.shape[:2] == parts.shape for t in stacked)
    assert torch.equal(stacked[0][-1], task.gather(parts[-1])[0])


def test_loss_of_the_parts_averages_to_the_whole(task: Task) -> None:
    model = task.build().double()
    parts = [task.loss(model, task.batch(1, replica=r, num_replicas=4)).item() for r in range(4)]
    assert np.mean(parts) == pytest.approx(task.loss(model, task.batch(1)).item(), rel=1e-12)


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
    fields, item, past, behaviour, _ = task.batch(0)
    changed = torch.where(behaviour == PADDING, torch.zeros_like(past), past)
    assert not torch.equal(changed, past)
    torch.testing.assert_close(model(fields, item, changed, behaviour), model(fields, item, past, behaviour))


def test_auc() -> None:
    assert auc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0])) == 1.0
    assert auc(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.0, 0.0, 1.0])) == 0.5
    assert auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])) == pytest.approx(0.875)


def test_missing_data_and_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"log\.npz is missing; the data are KuaiRand-Pure"):
        load_task("feed", tmp_path)
    with pytest.raises(ValueError, match="task must be one of stdlib-gpt, shakespeare-gpt, feed, but got 'mnist'"):
        load_task("mnist")


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
