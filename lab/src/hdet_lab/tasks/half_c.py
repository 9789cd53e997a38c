"""Tasks on other data: photographs, words, molecules, ratings, speech, weather, a field, tables.

Sizes and lengths were chosen by what a fixed learning rate needs in order to learn. Where data come from is in
:mod:`hdet_lab.tasks.packages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet_lab.models.convolutions import RingNet, SeriesNet, WaveNet
from hdet_lab.models.molecules import MessageNet
from hdet_lab.models.ratings import RatingNet
from hdet_lab.models.resnet import ResNet
from hdet_lab.tasks.base import Batch, decay_groups, evaluation_mode, random_rows
from hdet_lab.tasks.packages import ATOMS, NUM_WORDS, read_arrays
from hdet_lab.tasks.tabular import TabularTask
from hdet_lab.tasks.text import TextTask

VALIDATION_SHARE = 0.2
CHUNK = 512
"""Rows of a part of the validation set."""


class RowsTask:
    """Rows of some tensors, drawn at random; what is made of them is the subclass's.

    Args:
        name: of the task.
        tensors: each with a row for every example, the training rows first.
        num_train: how many of the rows are trained on; the others validate.
        total_steps, batch_rows: as in every task.
    """

    def __init__(
        self, name: str, tensors: Sequence[Tensor], num_train: int, *, total_steps: int, batch_rows: int
    ) -> None:
        self.name, self.num_train = name, num_train
        self.total_steps, self.batch_rows = total_steps, batch_rows
        for place, tensor in enumerate(tensors):
            setattr(self, f"data_{place}", tensor)
        self._num = len(tensors)
        self.validation_rows = torch.arange(num_train, len(tensors[0]))

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, f"data_{place}") for place in range(self._num)]

    def to(self, device: torch.device | str) -> RowsTask:
        for place, tensor in enumerate(self.tensors):
            setattr(self, f"data_{place}", tensor.to(device))
        return self

    def model(self, generator: torch.Generator) -> nn.Module:
        raise NotImplementedError

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return self.model(torch.Generator().manual_seed(seed))

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay``: matrices; ``no_decay``: norms and biases."""
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return random_rows(self.num_train, self.batch_rows, seed=seed, step=step)

    def gather(self, rows: Tensor) -> Batch:
        first = self.tensors[0]
        rows = rows.to(first.device)
        return tuple(tensor[rows] for tensor in self.tensors)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluation_mode(model):
            parts = torch.split(self.validation_rows, CHUNK)
            losses = torch.stack([self.loss(model, self.gather(rows)).double() * len(rows) for rows in parts])
        return {"loss": losses.sum().item() / len(self.validation_rows)}


def shuffled(num: int) -> NDArray[np.int64]:
    """An order of rows that is the same everywhere."""
    # Raw words, because NumPy guarantees those across versions.
    return np.argsort(np.random.PCG64(0).random_raw(num), kind="stable")


class CifarTask(RowsTask):
    """Which of ten things a photograph of 32x32 pixels shows: a ResNet with BatchNorm of 0.22M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 128, download: bool = True
    ) -> None:
        arrays = read_arrays("cifar10", data, download=download)
        images = torch.from_numpy(np.concatenate([arrays["train_images"], arrays["test_images"]]))
        labels = torch.from_numpy(np.concatenate([arrays["train_labels"], arrays["test_labels"]])).long()
        num_train = len(arrays["train_labels"])
        super().__init__("cifar10", [images, labels], num_train, total_steps=total_steps, batch_rows=batch_rows)

    def model(self, generator: torch.Generator) -> nn.Module:
        return ResNet(10, num_colours=3, generator=generator)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)


class MoleculesTask(RowsTask):
    """Which atoms a molecule has where they are hidden: messages along bonds, 0.15M parameters.

    Of each molecule a few atoms are hidden, always the same.
    """

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("molecules", data, download=download)
        order = shuffled(len(arrays["atoms"]))
        atoms, bonds = arrays["atoms"][order], arrays["bonds"][order]
        words = np.random.PCG64(1).random_raw(atoms.size).reshape(atoms.shape) / 2.0**64
        hidden = torch.from_numpy((words < 0.2) & (atoms > 0))
        tensors = [torch.from_numpy(atoms), torch.from_numpy(bonds), hidden]
        num_train = len(atoms) - int(len(atoms) * VALIDATION_SHARE)
        super().__init__("molecules", tensors, num_train, total_steps=total_steps, batch_rows=batch_rows)

    def model(self, generator: torch.Generator) -> nn.Module:
        return MessageNet(len(ATOMS) + 2, 4, generator=generator)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        atoms, bonds, hidden = batch
        seen = torch.where(hidden, len(ATOMS) + 1, atoms.long())
        entropy = F.cross_entropy(model(seen, bonds).flatten(0, 1), atoms.long().flatten(), reduction="none")
        mask = hidden.flatten().to(entropy.dtype)
        return (entropy * mask).sum() / mask.sum().clamp(min=1.0)


class RatingsTask(RowsTask):
    """How many stars a user gives a film (MovieLens, 100,004 ratings): embeddings, 0.32M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 256, download: bool = True
    ) -> None:
        arrays = read_arrays("movielens", data, download=download)
        order = shuffled(len(arrays["ratings"]))
        users, films = (torch.from_numpy(arrays[key][order]).long() for key in ("users", "films"))
        ratings = torch.from_numpy(arrays["ratings"][order])
        self.sizes = int(users.max()) + 1, int(films.max()) + 1
        num_train = len(users) - int(len(users) * VALIDATION_SHARE)
        super().__init__(
            "movielens", [users, films, ratings], num_train, total_steps=total_steps, batch_rows=batch_rows
        )

    def model(self, generator: torch.Generator) -> nn.Module:
        return RatingNet(*self.sizes, generator=generator)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        users, films, ratings = batch
        found: Tensor = model(users, films)
        return F.mse_loss(found, ratings.to(found.dtype))


HISTORY, AHEAD, BLOCK = 48, 24, 14 * 24
"""Hours that are seen, hours until the one that is predicted, and hours of a block of one kind of rows."""


class WeatherTask(RowsTask):
    """The temperature a day ahead at New York's airports, in degrees as they are, from two days of six measurements.

    Blocks of two weeks: four are trained on, the fifth validates.
    """

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 32, download: bool = True
    ) -> None:
        hours = torch.from_numpy(read_arrays("weather", data, download=download)["hours"])
        span = HISTORY + AHEAD
        starts = torch.arange(hours.shape[1] - span)
        first, last = starts // BLOCK, (starts + span) // BLOCK
        trains = (first % 5 != 4) & (last % 5 != 4)
        kinds = [starts[trains], starts[(first % 5 == 4) & (first == last)]]
        rows = torch.cat([place * hours.shape[1] + kind for kind in kinds for place in range(len(hours))])
        num_train = len(hours) * len(kinds[0])
        self.hours = hours.flatten(0, 1)
        super().__init__("weather", [rows], num_train, total_steps=total_steps, batch_rows=batch_rows)
        self._window = torch.arange(HISTORY)

    def to(self, device: torch.device | str) -> WeatherTask:
        super().to(device)
        self.hours, self._window = self.hours.to(device), self._window.to(device)
        return self

    def gather(self, rows: Tensor) -> Batch:
        """(series, temperature)."""
        (start,) = super().gather(rows)
        return self.hours[start.unsqueeze(-1) + self._window], self.hours[start + HISTORY + AHEAD - 1, 0]

    def model(self, generator: torch.Generator) -> nn.Module:
        return SeriesNet(self.hours.shape[1], generator=generator)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        series, temperature = batch
        return F.mse_loss(model(series), temperature)


class BurgersTask(RowsTask):
    """A field half a second later under Burgers' equation: circular convolutions, 0.07M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 16, download: bool = True
    ) -> None:
        arrays = read_arrays("burgers", data, download=download)
        tensors = [torch.from_numpy(arrays[key]) for key in ("before", "after")]
        num_train = len(tensors[0]) - int(len(tensors[0]) * VALIDATION_SHARE)
        super().__init__("burgers", tensors, num_train, total_steps=total_steps, batch_rows=batch_rows)

    def model(self, generator: torch.Generator) -> nn.Module:
        return RingNet(generator=generator)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        before, after = batch
        return F.mse_loss(model(before), after)


class SpeechTask(TextTask):
    """The next sample of speech, one of 256 by mu-law: a causal stack of convolutions, 0.14M parameters."""

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return WaveNet(self.vocabulary, generator=torch.Generator().manual_seed(seed))


def speech(data: str | Path = "data", *, download: bool = True, **sizes: int) -> SpeechTask:
    """:class:`SpeechTask` on recorded prompts at 8 kHz."""
    samples = torch.from_numpy(read_arrays("speech", data, download=download)["samples"])
    small = {"context": 256, "batch_rows": 8, "total_steps": 800, "num_validation": 256}
    return SpeechTask("speech", samples, 256, **{**small, **sizes})


def wikitext_gpt(data: str | Path = "data", *, download: bool = True, **sizes: int) -> TextTask:
    """Word-level GPT on the validation and test parts of WikiText-2, 1.4M parameters."""
    words = torch.from_numpy(read_arrays("wikitext", data, download=download)["words"])
    small = {"context": 64, "num_layers": 2, "width": 80, "batch_rows": 32, "total_steps": 600}
    return TextTask("wikitext-gpt", words, NUM_WORDS, **{**small, **sizes})


def diamonds_raw(data: str | Path = "data", *, download: bool = True, **sizes: Any) -> TabularTask:
    """What a diamond costs, in dollars as they are: 53,940 rows, an MLP."""
    arrays = read_arrays("diamonds", data, download=download)
    small = {"widths": (64, 64), "batch_rows": 64, "total_steps": 5000}
    return TabularTask("diamonds-raw", arrays["inputs"], arrays["targets"], **{**small, **sizes})


def flights(data: str | Path = "data", *, download: bool = True, **sizes: Any) -> TabularTask:
    """Whether a flight arrives more than 15 minutes late: 100,000 rows, a wide MLP."""
    arrays = read_arrays("flights", data, download=download)
    inputs, late = arrays["inputs"].astype(np.float32), arrays["targets"].astype(np.float32)
    small = {"widths": (512, 512), "batch_rows": 1024, "total_steps": 400, "num_classes": 2}
    return TabularTask("flights", inputs, late, **{**small, **sizes})
