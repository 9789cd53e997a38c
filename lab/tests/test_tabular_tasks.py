from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from hdet_lab.tasks import tabular_classes, tabular_regression, tabular_regression_raw
from hdet_lab.tasks.tabular import SHA256, TabularTask, read_table
from small_tasks import write_tables


def test_a_fifth_is_held_out_and_inputs_are_standardised(tmp_path: Path) -> None:
    write_tables(tmp_path)
    task = tabular_classes(tmp_path, check=False)
    assert task.validation_rows.tolist() == list(range(40, 50))
    assert max(int(task.rows(step).max()) for step in range(20)) == 39
    train = task.inputs[:40]
    assert train.mean(0).tolist() == pytest.approx([0.0] * 6, abs=1e-6)
    assert train.std(0, correction=0).tolist() == pytest.approx([1.0] * 5 + [0.0])  # the last column is constant
    assert sorted(task.targets.tolist()) == sorted(list(range(10)) * 5)


def test_raw_targets_are_those_of_the_file(tmp_path: Path) -> None:
    write_tables(tmp_path)
    raw, scaled = (make(tmp_path, check=False) for make in (tabular_regression_raw, tabular_regression))
    file = np.loadtxt(tmp_path / "tabular" / "diabetes_target.csv.gz")
    assert sorted(raw.targets.tolist()) == pytest.approx(sorted(file))
    assert scaled.targets[:40].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert torch.corrcoef(torch.stack([raw.targets, scaled.targets]))[0, 1].item() == pytest.approx(1.0)
    # Both see the same rows in the same order, so that they differ in the scale of the targets alone.
    assert torch.equal(raw.inputs, scaled.inputs)


def test_r2_is_nought_for_the_mean() -> None:
    inputs, targets = np.ones((50, 2), dtype=np.float32), np.arange(50, dtype=np.float32)
    task = TabularTask("t", inputs, targets, widths=())
    model = task.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        dict(model.named_parameters())["head.bias"].fill_(task.targets[task.validation_rows].mean())
    assert task.evaluate(model)["r2"] == pytest.approx(0.0, abs=1e-6)


def test_tables_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(tmp_path)
    with pytest.raises(ValueError, match=f"must have the SHA-256 {SHA256['digits.csv.gz']}, but got"):
        tabular_classes(tmp_path)
    monkeypatch.setattr("hdet_lab.tasks.tabular.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"digits\.csv\.gz is missing; .* pip install scikit-learn"):
        tabular_classes(tmp_path / "elsewhere")


def test_tables_of_an_installed_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(tmp_path)
    package = tmp_path / "sklearn" / "datasets"
    package.mkdir(parents=True)
    (tmp_path / "tabular").rename(package / "data")
    spec = ModuleSpec("sklearn", None, origin=str(tmp_path / "sklearn" / "__init__.py"))
    monkeypatch.setattr("hdet_lab.tasks.tabular.find_spec", {"sklearn": spec}.get)
    assert read_table(tmp_path, "diabetes_target.csv.gz", check=False).shape == (50,)


@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_tables_themselves(tmp_path: Path) -> None:
    assert tabular_classes(tmp_path).inputs.shape == (1797, 64)
    assert tabular_regression_raw(tmp_path).targets.mean().item() == pytest.approx(152.13, abs=0.01)
