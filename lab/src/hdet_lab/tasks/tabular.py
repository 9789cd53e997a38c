"""Small tables that scikit-learn ships: handwritten digits to tell apart, and the course of diabetes to predict."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet_lab.models.mlp import MLP
from hdet_lab.tasks.base import Batch, decay_groups, random_rows

# Of the numbers as float32, which are the same in every version; how they are written is not.
SHA256 = {
    "digits.csv.gz": "26285be35f630dda601bc1138f791afa5f8f5d5b0fccf612cdb28fe1f83bb4c5",
    "diabetes_data_raw.csv.gz": "364d6af10d06ac7ee663808f0facd92f57b939758169b67fb3e5c2b95521bbd5",
    "diabetes_target.csv.gz": "64c6aa6f4027afaed70d85b069db7079ab90ff693fe67e65c9550c8454b8f2af",
}
VALIDATION_SHARE = 0.2


class TabularTask:
    """An MLP on the rows of a table, a fixed fifth of them held out. Inputs are standardised by the training rows.

    Args:
        name: of the task.
        inputs: (rows, features).
        targets: (rows,): whole numbers from 0 for classes, others for a regression.
        num_classes: None for a regression.
        total_steps: default length of a run.
        batch_rows: rows of a global batch.
        widths: of the hidden layers.
        standardise: the targets of a regression too.
    """

    def __init__(
        self,
        name: str,
        inputs: NDArray[np.float32],
        targets: NDArray[np.float32],
        *,
        num_classes: int | None = None,
        total_steps: int = 1000,
        batch_rows: int = 64,
        widths: Sequence[int] = (256, 256),
        standardise: bool = False,
    ) -> None:
        # Raw words, because NumPy guarantees those across versions.
        order = np.argsort(np.random.PCG64(0).random_raw(len(inputs)), kind="stable")
        x, y = torch.from_numpy(inputs[order]), torch.from_numpy(targets[order])
        self.num_train = len(x) - int(len(x) * VALIDATION_SHARE)
        self.name = name
        self.total_steps = total_steps
        self.batch_rows = batch_rows
        self.widths = tuple(widths)
        self.num_classes = num_classes
        self.inputs = _standardised(x, self.num_train)
        self.targets = _standardised(y, self.num_train) if standardise else y
        if num_classes is not None:
            self.targets = self.targets.long()
        self.validation_rows = torch.arange(self.num_train, len(x))

    def to(self, device: torch.device | str) -> TabularTask:
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
        return self

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return MLP(self.inputs.shape[1], self.num_classes or 1, widths=self.widths, generator=generator)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay``: matrices; ``no_decay``: biases."""
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return random_rows(self.num_train, self.batch_rows, seed=seed, step=step)

    def gather(self, rows: Tensor) -> Batch:
        """(inputs, targets)."""
        rows = rows.to(self.targets.device)
        return self.inputs[rows], self.targets[rows]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Cross-entropy of the class, or the squared error."""
        inputs, targets = batch
        found: Tensor = model(inputs)
        if self.num_classes is not None:
            return F.cross_entropy(found, targets)
        return F.mse_loss(found.squeeze(-1), targets.to(found.dtype))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss``, and ``accuracy`` of classes or ``r2`` of a regression: both 1 at best."""
        inputs, targets = self.gather(self.validation_rows)
        loss = self.loss(model, (inputs, targets)).item()
        if self.num_classes is not None:
            return {"loss": loss, "accuracy": (model(inputs).argmax(1) == targets).double().mean().item()}
        return {"loss": loss, "r2": 1 - loss / targets.double().var(correction=0).item()}


def tabular_classes(data: str | Path = "data", *, check: bool = True, **sizes: Any) -> TabularTask:
    """Which digit 8x8 grey pixels show: 1797 rows, 10 classes.

    Args:
        data: folder that may hold ``tabular/digits.csv.gz``; otherwise the installed scikit-learn's is read.
        check: compare the numbers with their SHA-256.
        **sizes: as in :class:`TabularTask`.
    """
    table = read_table(Path(data), "digits.csv.gz", delimiter=",", check=check)
    return TabularTask("tabular", table[:, :-1], table[:, -1], num_classes=10, **sizes)


def tabular_regression(data: str | Path = "data", *, check: bool = True, **sizes: Any) -> TabularTask:
    """How far diabetes has got after a year, from ten measurements: 442 rows, standardised targets.

    Args:
        data: folder that may hold ``tabular/diabetes_*.csv.gz``; otherwise the installed scikit-learn's are read.
        check: compare the numbers with their SHA-256.
        **sizes: as in :class:`TabularTask`.
    """
    return _diabetes("tabular-regression", data, check=check, standardise=True, **sizes)


def tabular_regression_raw(data: str | Path = "data", *, check: bool = True, **sizes: Any) -> TabularTask:
    """:func:`tabular_regression` with the targets as they are: 25 to 346, mean 152."""
    return _diabetes("tabular-regression-raw", data, check=check, standardise=False, **sizes)


def linear_raw(data: str | Path = "data", *, check: bool = True, **sizes: Any) -> TabularTask:
    """:func:`tabular_regression_raw` with a linear model, whose weights have far to go: its learning rate is large."""
    linear = {"widths": (), "standardise": False}
    return _diabetes("linear-raw", data, check=check, **{**linear, **sizes})


def read_table(data: Path, name: str, *, delimiter: str | None = None, check: bool = True) -> NDArray[np.float32]:
    """The numbers in ``<data>/tabular/<name>``, or in the file of that name that scikit-learn ships."""
    path = data / "tabular" / name
    package = find_spec("sklearn")  # found, not imported: SciPy alone takes a second
    if not path.exists() and package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; put it there, or install scikit-learn, which ships it: pip install scikit-learn"
        )
    table = np.loadtxt(path, delimiter=delimiter, dtype=np.float64).astype("<f4")
    found = hashlib.sha256(np.ascontiguousarray(table).tobytes()).hexdigest()
    if check and found != SHA256[name]:
        raise ValueError(f"the numbers in {path} must have the SHA-256 {SHA256[name]}, but got {found}")
    return table.astype(np.float32)


def _diabetes(name: str, data: str | Path, *, check: bool, **options: Any) -> TabularTask:
    inputs = read_table(Path(data), "diabetes_data_raw.csv.gz", check=check)
    targets = read_table(Path(data), "diabetes_target.csv.gz", check=check)
    # A larger model, or a longer run, memorises the 354 training rows.
    small = {"widths": (64, 64), "batch_rows": 32, "total_steps": 300}
    return TabularTask(name, inputs, targets, **{**small, **options})


def _standardised(values: Tensor, num_train: int) -> Tensor:
    """Mean 0 and deviation 1 over the first ``num_train`` rows; a constant column becomes 0."""
    mean, std = values[:num_train].mean(0), values[:num_train].std(0, correction=0)
    return (values - mean) / torch.where(std > 0, std, torch.ones_like(std))
