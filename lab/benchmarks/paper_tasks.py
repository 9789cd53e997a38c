"""The tasks that the paper's claims are tested on, small enough for two cores or in full, and what surrounds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.resnet import ResNet
from hdet_lab.tasks import load_task
from hdet_lab.tasks.base import Batch, Task, decay_groups, evaluation_mode, random_rows
from hdet_lab.tasks.quadratic import QuadraticTask
from hdet_lab.tasks.text import TextTask, characters

SMALL: dict[str, dict[str, Any]] = {
    "shakespeare-gpt": {"context": 24, "batch_rows": 16, "width": 24, "num_layers": 2, "num_heads": 2,
                        "num_validation": 128},
    "feed": {"batch_rows": 128, "history": 8, "width": 8, "field_width": 4, "num_layers": 1, "num_test_days": 1},
    "fashion": {"batch_rows": 32, "widths": (4, 8, 8)},
    "quadratic": {},
    "wikitext": {"context": 24, "batch_rows": 16, "width": 24, "num_layers": 2, "num_heads": 2, "num_validation": 128},
    "cifar": {"batch_rows": 16, "widths": (4, 8, 8)},
}  # fmt: skip
STEPS = {"shakespeare-gpt": 240, "wikitext": 240, "feed": 100, "fashion": 100, "cifar": 100, "quadratic": 300,
         "two-groups": 300}  # fmt: skip
FULL_STEPS = {"shakespeare-gpt": 600, "wikitext": 600, "feed": 160, "fashion": 600, "cifar": 600, "quadratic": 1000}
LRS = {
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
    "sgd": (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0),
}


class TwoGroups(QuadraticTask):
    """The quadratic with its flat and its steep half as two param groups, each in need of its own learning rate."""

    def build(self, seed: int = 0) -> nn.Module:
        start = super().build(seed).theta.detach()  # type: ignore[operator]
        flat, steep = torch.tensor_split(start, 2)
        return _TwoParts(flat, steep)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        return {"flat": ["flat"], "steep": ["steep"]}


class _TwoParts(nn.Module):
    def __init__(self, flat: Tensor, steep: Tensor) -> None:
        super().__init__()
        self.flat, self.steep = nn.Parameter(flat.clone()), nn.Parameter(steep.clone())

    def forward(self) -> Tensor:
        return torch.cat([self.flat, self.steep])


class Later:
    """A task from a later step on: the second stage of a run does not see the batches of the first again."""

    def __init__(self, task: Task, first_step: int) -> None:
        self._task, self._first_step = task, first_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return self._task.rows(step + self._first_step, seed=seed)


def wikitext(data: Path, **sizes: Any) -> TextTask:
    """A GPT on the characters of WikiText-2's test.txt and valid.txt, below ``data/wikitext-2``; 3.3M parameters.

    They are the files of pytorch/examples, word_language_model/data. The larger train.txt is not read.
    """
    text = b"".join((data / "wikitext-2" / name).read_bytes() for name in ("test.txt", "valid.txt"))
    return TextTask("wikitext", *characters(text), **{"width": 256, "num_heads": 4, "batch_rows": 32, **sizes})


class Cifar:
    """CIFAR-10 with a small ResNet and mirrored images, from the arrays x_train to y_test of data/cifar10.npz.

    Images are bytes of shape (n, 32, 32, 3). Mirrored ones are rows too, after all others.
    """

    name, total_steps = "cifar", 600

    def __init__(self, data: Path, *, batch_rows: int = 512, widths: Sequence[int] = (32, 64, 128)) -> None:
        with np.load(data / "cifar10.npz") as found:
            parts = {name: torch.from_numpy(found[name]) for name in ("x_train", "y_train", "x_test", "y_test")}
        self.num_train = len(parts["y_train"])
        self.images = torch.cat([parts["x_train"], parts["x_test"]]).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.cat([parts["y_train"], parts["y_test"]]).long()
        self.validation_rows = torch.arange(self.num_train, len(self.labels))
        self.batch_rows, self.widths = batch_rows, tuple(widths)

    def to(self, device: torch.device | str) -> Cifar:
        self.images, self.labels = self.images.to(device), self.labels.to(device)
        return self

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return ColourResNet(10, widths=self.widths, generator=torch.Generator().manual_seed(seed))

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        drawn = random_rows(2 * self.num_train, self.batch_rows, seed=seed, step=step)
        return drawn // self.num_train * len(self.labels) + drawn % self.num_train

    def gather(self, rows: Tensor) -> Batch:
        rows = rows.to(self.labels.device)
        image = rows % len(self.labels)
        images = self.images[image]
        return torch.where((rows < len(self.labels))[..., None, None, None], images, images.flip(-1)), self.labels[
            image
        ]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = []
        with evaluation_mode(model):
            for rows in torch.split(self.validation_rows, 500):
                images, labels = self.gather(rows)
                logits = model(images).double()
                found.append(
                    torch.stack([F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).double().mean()])
                )
        loss, accuracy = torch.stack(found).mean(0).tolist()
        return {"loss": loss, "accuracy": accuracy}


class ColourResNet(ResNet):
    """The lab's ResNet for colour images. Convolutions are matrix products, which many models share one kernel for."""

    def __init__(self, num_classes: int, *, widths: Sequence[int], generator: torch.Generator) -> None:
        super().__init__(num_classes, widths=widths, generator=generator)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        with torch.no_grad():
            self.stem.weight.normal_(0.0, math.sqrt(2 / 27), generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.forward = _unfolded.__get__(module)  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        x = (images.to(self.stem.weight.dtype) / 255 - 0.47) / 0.25
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _unfolded(self: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution as a matrix product."""
    columns = F.unfold(x, self.kernel_size, padding=self.padding, stride=self.stride)  # type: ignore[arg-type]
    found = torch.einsum("ok,bkl->bol", self.weight.flatten(1), columns)
    side = x.shape[-1] // self.stride[0]
    return found.view(*found.shape[:-1], side, side)


def make_task(name: str, data: Path, *, full: bool, **options: Any) -> Task:
    """By name, small unless ``full``."""
    if name == "two-groups":
        return TwoGroups()
    options = {**({} if full else SMALL.get(name, {})), **options}
    if name in ("wikitext", "cifar"):
        return wikitext(data, **options) if name == "wikitext" else Cifar(data, **options)
    return load_task(name, data, **options)


def steps_of(name: str, *, full: bool) -> int:
    """How long a run of it is."""
    return (FULL_STEPS if full else STEPS).get(name, STEPS.get(name, 300))
