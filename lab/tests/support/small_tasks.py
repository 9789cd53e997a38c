"""A small instance of every task, on data made up where the task has data of its own."""

from __future__ import annotations

import gzip
import hashlib
import re
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdet_lab.tasks import (
    FashionDiffusionTask,
    FashionTask,
    FashionViTTask,
    FashionWideTask,
    FeedTask,
    FineTuneTask,
    QuadraticTask,
    Task,
    code_gpt,
    fashion_batch_8,
    fashion_batch_1024,
    finetune_gpt,
    finetune_gpt_10m,
    finetune_lora,
    finetune_lora_10m,
    linear_raw,
    shakespeare_gpt,
    shakespeare_gpt_10m,
    shakespeare_lstm,
    stdlib_gpt,
    tabular_classes,
    tabular_regression,
    tabular_regression_raw,
    word_gpt,
)
from hdet_lab.tasks.pretrained import Pretraining

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "lab.md"
GPT_SIZES = {"context": 8, "num_layers": 1, "width": 8, "num_heads": 2}
SMALL: dict[str, Any] = {**GPT_SIZES, "batch_rows": 12, "num_validation": 20}


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


def write_fashion(folder: Path, *, num_train: int = 40, num_test: int = 10) -> None:
    random = np.random.default_rng(0)
    place = folder / "fashion-mnist"
    place.mkdir()
    for part, num in (("train", num_train), ("t10k", num_test)):
        images = random.integers(0, 256, (num, 28, 28)).astype(np.uint8)
        labels = random.integers(0, 10, num).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
            (place / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))


def small_fashion(folder: Path, make: Callable[..., FashionTask] = FashionTask) -> FashionTask:
    write_fashion(folder)
    return make(folder, check=False, widths=(4, 8), batch_rows=12)


def small_vit(folder: Path) -> FashionViTTask:
    write_fashion(folder)
    return FashionViTTask(folder, check=False, num_layers=1, width=8, num_heads=2, batch_rows=12)


def small_diffusion(folder: Path) -> FashionDiffusionTask:
    write_fashion(folder)
    return FashionDiffusionTask(folder, check=False, widths=(8,), num_draws=16, batch_rows=12)


def small_feed(folder: Path) -> Task:
    write_feed(folder)
    return FeedTask(folder, batch_rows=12, history=3, width=8)


def small_shakespeare(folder: Path, make: Callable[..., Task], **sizes: int) -> Task:
    write_shakespeare(folder)
    return make(folder, sha256=None, batch_rows=12, num_validation=20, **(sizes or GPT_SIZES))


def write_sets(folder: Path, sets: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, with arrays as packages give them, which no hash is asked of."""
    monkeypatch.setattr("hdet_lab.tasks.packages.SHA256", {})
    (folder / "open").mkdir()
    for name, arrays in sets.items():
        np.savez(folder / "open" / f"{name}.npz", **arrays)
    return folder


def write_tables(folder: Path, *, num_rows: int = 50) -> None:
    random = np.random.default_rng(0)
    place = folder / "tabular"
    place.mkdir()
    digits = np.c_[random.integers(0, 17, (num_rows, 5)), np.full(num_rows, 3), np.arange(num_rows) % 10]
    np.savetxt(place / "digits.csv.gz", digits, fmt="%d", delimiter=",")
    np.savetxt(place / "diabetes_data_raw.csv.gz", random.normal(50.0, 20.0, (num_rows, 4)))
    np.savetxt(place / "diabetes_target.csv.gz", random.normal(150.0, 70.0, num_rows))


def write_wheels(folder: Path) -> dict[str, str]:
    """Two wheels below ``folder``; returns their pins."""
    place = folder / "code" / "wheels"
    place.mkdir(parents=True)
    pins = {}
    for package in ("north", "south"):
        path = place / f"{package}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{package}/__init__.py", f"import {package}.code\n" * 10)
            file.writestr(f"{package}/code.py", f"def {package}():\n    return 1\n" * 10)
            file.writestr(f"{package}/tests/test_code.py", "assert True\n")
            file.writestr(f"{package}/README", "nothing\n")
        pins[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return pins


def small_code(folder: Path) -> Task:
    return code_gpt(folder, wheels=write_wheels(folder), sha256=None, **SMALL)


def small_finetune(folder: Path, make: Callable[..., FineTuneTask] = finetune_gpt) -> FineTuneTask:
    write_shakespeare(folder)
    code = {"wheels": write_wheels(folder), "sha256": None, "batch_rows": 4}
    return make(folder, code=code, pretraining=Pretraining(steps=12), sha256=None, **SMALL)


def small_tabular(folder: Path, make: Callable[..., Task], widths: tuple[int, ...] = (8, 8)) -> Task:
    write_tables(folder)
    return make(folder, check=False, batch_rows=12, widths=widths)


@cache
def example_of_the_docs() -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, DOCS.name, "exec"), names)
    return names


def small_example(folder: Path) -> Task:
    task: Task = example_of_the_docs()["WaveTask"](batch_rows=12)
    return task


SMALL_TASKS: dict[str, Callable[[Path], Task]] = {
    "stdlib-gpt": lambda folder: stdlib_gpt(max_bytes=20_000, **SMALL),
    "code-gpt": small_code,
    "shakespeare-gpt": lambda folder: small_shakespeare(folder, shakespeare_gpt),
    "shakespeare-gpt-10m": lambda folder: small_shakespeare(folder, shakespeare_gpt_10m),
    "word-gpt": lambda folder: small_shakespeare(folder, partial(word_gpt, num_words=5)),
    "lstm": lambda folder: small_shakespeare(folder, shakespeare_lstm, context=8, width=8),
    "finetune-gpt": lambda folder: small_finetune(folder, finetune_gpt),
    "finetune-lora": lambda folder: small_finetune(folder, partial(finetune_lora, rank=2)),
    "finetune-gpt-10m": lambda folder: small_finetune(folder, finetune_gpt_10m),
    "finetune-lora-10m": lambda folder: small_finetune(folder, partial(finetune_lora_10m, rank=2)),
    "feed": small_feed,
    "fashion": small_fashion,
    "fashion-batch-8": lambda folder: small_fashion(folder, fashion_batch_8),
    "fashion-batch-1024": lambda folder: small_fashion(folder, fashion_batch_1024),
    "fashion-vit": small_vit,
    "fashion-wide": lambda folder: small_fashion(folder, FashionWideTask),
    "fashion-diffusion": small_diffusion,
    "tabular": lambda folder: small_tabular(folder, tabular_classes),
    "tabular-regression": lambda folder: small_tabular(folder, tabular_regression),
    "tabular-regression-raw": lambda folder: small_tabular(folder, tabular_regression_raw),
    "linear-raw": lambda folder: small_tabular(folder, linear_raw, widths=()),
    "quadratic": lambda folder: QuadraticTask(dimension=7, batch_rows=12, num_rows=50),
    "wave": small_example,
}
