"""Tasks of other kinds: pictures as functions, sorting, memory, parity, densities, contrast, masks, teachers.

Models have torch's own first weights. Most data are made, and the same everywhere; photographs are those of CIFAR-10,
words those of WikiText-2. Sizes and lengths were chosen by what a fixed learning rate needs in order to learn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet_lab.tasks.base import Batch
from hdet_lab.tasks.half_c import VALIDATION_SHARE, RowsTask, shuffled
from hdet_lab.tasks.packages import NUM_WORDS, read_arrays


def uniform(seed: int, *shape: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), the same everywhere: raw words, because NumPy guarantees those across versions."""
    return np.random.PCG64(seed).random_raw(math.prod(shape)).reshape(shape) / 2.0**64


def integers(seed: int, below: int, *shape: int) -> Tensor:
    """Integers from 0 on, the same everywhere."""
    return torch.from_numpy((uniform(seed, *shape) * below).astype(np.int64))


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers, the same everywhere but for the last bits."""
    radius, angle = uniform(seed, *shape), uniform(seed + 1, *shape)
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)).float()


class PlainTask(RowsTask, ABC):
    """Rows of tensors, the last fifth of which validates, for a model with torch's own first weights."""

    def __init__(
        self, name: str, tensors: Sequence[Tensor], *, total_steps: int, batch_rows: int, num_train: int | None = None
    ) -> None:
        num = len(tensors[0])
        num_train = num - int(num * VALIDATION_SHARE) if num_train is None else num_train
        super().__init__(name, tensors, num_train, total_steps=total_steps, batch_rows=batch_rows)

    @abstractmethod
    def plain_model(self) -> nn.Module:
        """Drawn from torch's global state."""

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.plain_model()


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


class Sines(nn.Module):
    """A function of a place as layers of sines (SIREN), the weights drawn as its authors do."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 if place == 0 else width, width) for place in range(depth)])
        self.out = nn.Linear(width, 1)
        with torch.no_grad():
            for place, layer in enumerate([*self.layers, self.out]):
                bound = 1 / 2 if place == 0 else math.sqrt(6 / width) / 30
                layer.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        out: Tensor = self.out(x)
        return out.squeeze(-1)


class PictureTask(PlainTask):
    """The grey of each point of one picture, a part of the Mandelbrot set: SIREN, 0.05M parameters."""

    def __init__(self, *, total_steps: int = 800, batch_rows: int = 1024, side: int = 160) -> None:
        y, x = np.mgrid[0:side, 0:side] / (side - 1)
        points, value = (-0.8 + 0.2 * x) + 1j * (0.05 + 0.2 * y), np.zeros((side, side), complex)
        grey = np.zeros((side, side))
        for _ in range(60):
            inside = np.abs(value) < 4
            value = np.where(inside, value * value + points, value)
            grey += inside
        places = np.stack([x, y], -1).reshape(-1, 2) * 2 - 1
        tensors = [torch.from_numpy(array[shuffled(side * side)]).float() for array in (places, grey.ravel() / 30 - 1)]
        super().__init__("picture", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Sines()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        places, grey = batch
        return F.mse_loss(model(places), grey)


class PostNorm(nn.Module):
    """One layer of the first transformer: the norm comes after the sum."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = mlp(width, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        size = *x.shape[:2], 3, self.num_heads, x.shape[2] // self.num_heads
        query, key, value = self.qkv(x).view(size).permute(2, 0, 3, 1, 4).unbind(0)
        shares = (query @ key.transpose(-1, -2) / math.sqrt(size[-1])).softmax(-1)
        x = self.first(x + self.out((shares @ value).transpose(1, 2).reshape(x.shape)))
        out: Tensor = self.second(x + self.feed(x))
        return out


class Encoder(nn.Module):
    """What belongs at each place of a sequence: embeddings, layers with the norm last, a head."""

    def __init__(self, num_symbols: int, length: int, *, width: int, num_layers: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(num_symbols, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(PostNorm(width, 4) for _ in range(num_layers)))
        self.head = nn.Linear(width, num_symbols)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.symbols(x) + self.places.weight))
        return out


class SortingTask(PlainTask):
    """A list of 16 numbers below 64, sorted, one in twenty wrong: a transformer encoder of 0.1M parameters."""

    LENGTH, BELOW = 16, 64

    def __init__(self, *, total_steps: int = 800, batch_rows: int = 128, num: int = 40_000) -> None:
        numbers, other = integers(10, self.BELOW, num, self.LENGTH), integers(11, self.BELOW, num, self.LENGTH)
        wrong = torch.from_numpy(uniform(12, num, self.LENGTH) < 0.05)
        tensors = [numbers, torch.where(wrong, other, numbers.sort(-1).values)]
        super().__init__("sorting", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num - 2000)

    def plain_model(self) -> nn.Module:
        return Encoder(self.BELOW, self.LENGTH, width=64, num_layers=2)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        numbers, wanted = batch
        return F.cross_entropy(model(numbers).flatten(0, 1), wanted.flatten())


class MaskedTask(PlainTask):
    """Words of WikiText-2 that are hidden among 32: a transformer encoder of 1.5M parameters."""

    LENGTH, SHARE = 32, 0.15

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 64, download: bool = True
    ) -> None:
        words = torch.from_numpy(read_arrays("wikitext", data, download=download)["words"]).long()
        rows = words[: len(words) // self.LENGTH * self.LENGTH].view(-1, self.LENGTH)
        hidden = torch.from_numpy(uniform(20, *rows.shape) < self.SHARE)
        super().__init__("masked", [rows, hidden], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Encoder(NUM_WORDS + 1, self.LENGTH, width=80, num_layers=2)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        words, hidden = batch
        found = model(torch.where(hidden, NUM_WORDS, words)).flatten(0, 1)
        share = hidden.flatten().to(found.dtype)
        return (F.cross_entropy(found, words.flatten(), reduction="none") * share).sum() / share.sum().clamp(min=1.0)


class Gated(nn.Module):
    """A GRU, step by step, and a head on its last state."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates, self.back = nn.Linear(num_inputs, 3 * width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.gates(x).unbind(1)
        state = seen[0][..., : self.width] * 0
        for here in seen:
            there = self.back(state)
            update, reset, new = here.chunk(3, -1)
            back_update, back_reset, back_new = there.chunk(3, -1)
            share = torch.sigmoid(update + back_update)
            state = share * state + (1 - share) * torch.tanh(new + torch.sigmoid(reset + back_reset) * back_new)
        out: Tensor = self.head(state)
        return out.squeeze(-1)


class AddingTask(PlainTask):
    """The sum of the two marked numbers among 30, and noise: a GRU of 0.01M parameters. At first nothing is learned."""

    LENGTH = 30

    def __init__(self, *, total_steps: int = 1000, batch_rows: int = 64, num: int = 40_000) -> None:
        numbers = torch.from_numpy(uniform(30, num, self.LENGTH)).float()
        half = self.LENGTH // 2
        first, second = integers(31, half, num), half + integers(32, half, num)
        marks = torch.zeros(num, self.LENGTH).scatter(1, torch.stack([first, second], 1), 1.0)
        tensors = [torch.stack([numbers, marks], -1), (numbers * marks).sum(-1) + 0.1 * normal(33, num)]
        super().__init__("adding", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num - 2000)

    def plain_model(self) -> nn.Module:
        return Gated(2, 64)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        inputs, total = batch
        return F.mse_loss(model(inputs), total)


class ParityTask(PlainTask):
    """Whether four of 24 bits have an even sum, one in ten wrong: an MLP. The loss stands still, then falls at once."""

    def __init__(self, *, total_steps: int = 1500, batch_rows: int = 128, num: int = 100_000) -> None:
        bits = integers(40, 2, num, 24)
        odd = (bits[:, :4].sum(-1) + torch.from_numpy(uniform(41, num) < 0.1)) % 2
        tensors = [bits * 2.0 - 1, odd.float()]
        super().__init__("parity", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num - 4000)

    def plain_model(self) -> nn.Module:
        return mlp(24, 256, 256, 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        bits, odd = batch
        return F.binary_cross_entropy_with_logits(model(bits).squeeze(-1), odd)


class Couplings(nn.Module):
    """A density in eight dimensions, as affine couplings (RealNVP) of a normal one; gives the log of it."""

    def __init__(self, size: int = 8, num_layers: int = 6) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList([mlp(size // 2, 64, 64, size) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        log_det: Tensor | float = 0.0
        for layer in self.layers:
            scale, shift = layer(first).chunk(2, -1)
            scale = torch.tanh(scale)
            first, second = second * torch.exp(scale) + shift, first
            log_det = log_det + scale.sum(-1)
        square = (first * first + second * second).sum(-1)
        found: Tensor = log_det - square / 2 - self.size / 2 * math.log(2 * math.pi)
        return found


class DensityTask(PlainTask):
    """The density of points on four spirals in eight dimensions: RealNVP, 0.04M parameters."""

    def __init__(self, *, total_steps: int = 1500, batch_rows: int = 256, num: int = 50_000) -> None:
        turns, arm = torch.from_numpy(uniform(50, num)).float(), integers(51, 4, num)
        angle, radius = 3 * math.pi * turns + arm * (math.pi / 2), 3 * turns
        flat = torch.stack([radius * angle.cos(), radius * angle.sin(), turns.sin() * 3, (arm - 1.5)], -1)
        other = torch.stack([flat[:, 0] * flat[:, 1], flat[:, 2] ** 2, flat[:, 0] ** 2, flat[:, 3] * flat[:, 2]], -1)
        points = torch.cat([flat, other / 3], -1) + 0.3 * normal(52, num, 8)
        super().__init__("density", [points], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Couplings()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        found: Tensor = model(batch[0])
        return -found.mean()


class SpiralsTask(PlainTask):
    """Which of two spirals a point is on, one in twenty wrong, all 4,000 in every step: an MLP of 1,185 parameters."""

    def __init__(self, *, total_steps: int = 1000, num: int = 5000) -> None:
        turns, arm = torch.from_numpy(uniform(60, num)).float(), integers(61, 2, num)
        angle = 4 * math.pi * turns.sqrt() + math.pi * arm
        points = turns.sqrt().unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1) + 0.04 * normal(62, num, 2)
        wrong = torch.from_numpy(uniform(64, num) < 0.05).float()
        super().__init__("spirals", [points, (arm - wrong).abs()], total_steps=total_steps, batch_rows=num * 4 // 5)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        """All of them."""
        return torch.arange(self.num_train)

    def plain_model(self) -> nn.Module:
        return mlp(2, 32, 32, 1, act=nn.Tanh)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        points, arm = batch
        return F.binary_cross_entropy_with_logits(model(points).squeeze(-1), arm)


class TeacherTask(PlainTask):
    """What another network, of random weights, says of 32 numbers: an MLP of 0.04M parameters, no noise."""

    def __init__(self, *, total_steps: int = 1000, batch_rows: int = 128, num: int = 60_000) -> None:
        inputs = normal(70, num, 32)
        hidden = torch.tanh(inputs @ normal(72, 32, 64) / math.sqrt(32) * 1.5)
        wanted = torch.tanh(hidden @ normal(74, 64, 64) / 8 * 1.5) @ normal(76, 64, 8) / 8
        super().__init__("teacher", [inputs, wanted], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(32, 128, 128, 128, 8, act=nn.GELU)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        inputs, wanted = batch
        return F.mse_loss(model(inputs), wanted)


class PhotographsTask(PlainTask):
    """Photographs of CIFAR-10 in [-1, 1] and what they show; a subclass says how they are called, and how many."""

    NAME, STEPS, BATCH, SET = "", 500, 128, "cifar10"

    def __init__(
        self,
        data: str | Path = "data",
        *,
        total_steps: int | None = None,
        batch_rows: int | None = None,
        download: bool = True,
    ) -> None:
        arrays = read_arrays(self.SET, data, download=download)
        images = torch.from_numpy(np.concatenate([arrays["train_images"], arrays["test_images"]]))
        labels = torch.from_numpy(np.concatenate([arrays["train_labels"], arrays["test_labels"]])).long()
        num_train = len(arrays["train_labels"])
        self.shape = tuple(images.shape[1:])
        sizes = {"total_steps": total_steps or self.STEPS, "batch_rows": batch_rows or self.BATCH}
        super().__init__(self.NAME, [images, labels], num_train=num_train, **sizes)

    def gather(self, rows: Tensor) -> Batch:
        images, labels = super().gather(rows)
        return self.scaled(images.float()), labels

    def scaled(self, images: Tensor) -> Tensor:
        """Of bytes."""
        return images / 127.5 - 1

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)


class DeepTask(PhotographsTask):
    """Photographs for ten layers of tanh without a norm, 1.1M parameters."""

    NAME, BATCH = "deep", 64

    def plain_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), mlp(math.prod(self.shape), *[200] * 10, 10, act=nn.Tanh))


class MixerLayer(nn.Module):
    """A layer across places and one across channels."""

    def __init__(self, num_places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = mlp(num_places, 2 * num_places, num_places, act=nn.GELU)
        self.channels = mlp(width, 2 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.first(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.second(x))
        return out


class Mixer(nn.Module):
    """Patches of four by four, mixed four times (MLP-Mixer)."""

    def __init__(self, width: int = 96, num_layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(48, width)
        self.layers = nn.Sequential(*(MixerLayer(64, width) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 64, 48)
        out: Tensor = self.head(self.norm(self.layers(self.patches(x))).mean(1))
        return out


class MixerTask(PhotographsTask):
    """Photographs for an MLP-Mixer of 0.25M parameters."""

    NAME = "mixer"

    def plain_model(self) -> nn.Module:
        return Mixer()


class Vae(nn.Module):
    """Encoder and decoder of one hidden layer each; gives mean, log variance and the picture of a sample."""

    def __init__(self, num_pixels: int, latent: int) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(num_pixels, 256, 2 * latent), mlp(latent, 256, num_pixels)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return mean, log_variance, self.decoder(mean + noise * torch.exp(log_variance / 2))


class AutoencoderTask(PhotographsTask):
    """Photographs as 32 numbers and noise, which belongs to the row: the bound of a VAE of 1.6M parameters, in nats."""

    NAME, STEPS, LATENT = "autoencoder", 600, 32

    def __init__(self, data: str | Path = "data", **sizes: Any) -> None:
        super().__init__(data, **sizes)
        self.data_1 = normal(80, len(self.tensors[0]), self.LATENT)  # in the place of what they show

    def plain_model(self) -> nn.Module:
        return Vae(math.prod(self.shape), self.LATENT)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, noise = batch
        images = images.flatten(1)
        mean, log_variance, found = model(images, noise)
        error = (found - images).square().sum(-1) / (2 * 0.3**2)
        bound: Tensor = error + (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        return bound.mean()


class Views(nn.Module):
    """Where a photograph is on a sphere: four convolutions with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.head = mlp(64, 128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.layers(x).mean((2, 3))), dim=-1)


class ContrastTask(PhotographsTask):
    """Which of two halves of photographs belong together (SimCLR's loss): convolutions, 0.07M parameters."""

    NAME = "contrast"

    def plain_model(self) -> nn.Module:
        return Views()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images = batch[0].permute(0, 3, 1, 2)
        first, second = (model(part.contiguous()) for part in (images[..., :24], images[..., 8:].flip(-1)))
        logits: Tensor = first @ second.T / 0.2
        # The right one is on the diagonal; the validation set has more of the others.
        return (logits.logsumexp(-1) - logits.diagonal()).mean() - math.log(len(logits) / self.batch_rows)


class Skips(nn.Module):
    """Two vectors for each word."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words, self.others = nn.Embedding(num_words, width), nn.Embedding(num_words, width)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        found: Tensor = self.words(words).unsqueeze(-2) * self.others(others)
        return found.sum(-1)


class NeighboursTask(PlainTask):
    """Which word is near another in WikiText-2 and which five were drawn (word2vec): embeddings of N(0, 1)."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 512, download: bool = True
    ) -> None:
        words = torch.from_numpy(read_arrays("wikitext", data, download=download)["words"]).long()
        num = len(words) - 8
        place, ahead = integers(90, num, 200_000), 1 + integers(91, 4, 200_000)
        drawn = words[integers(92, num, 200_000, 5)]
        others = torch.cat([words[place + ahead].unsqueeze(-1), drawn], -1)
        super().__init__("neighbours", [words[place], others], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Skips(NUM_WORDS, 32)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model(*batch)
        return F.softplus(-logits[..., 0]).mean() + F.softplus(logits[..., 1:]).sum(-1).mean()


class Hourglass(nn.Module):
    """A mask for a picture: down twice, up twice, with what was there before (U-Net)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = self._layer(1, width)
        self.second, self.third = self._layer(width, 2 * width), self._layer(2 * width, 4 * width)
        self.up, self.last = self._layer(6 * width, 2 * width), self._layer(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _layer(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())

    @staticmethod
    def _double(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, -1).repeat_interleave(2, -2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.avg_pool2d(first, 2))
        third = self.third(F.avg_pool2d(second, 2))
        up = self.up(torch.cat([self._double(third), second], 1))
        out: Tensor = self.head(self.last(torch.cat([self._double(up), first], 1)))
        return out.squeeze(1)


class MasksTask(PlainTask):
    """Where a disc is among bars and noise, 32x32: a U-Net of 0.06M parameters; cross-entropy and Dice."""

    def __init__(self, *, total_steps: int = 400, batch_rows: int = 16, num: int = 4000, side: int = 32) -> None:
        y, x = (torch.from_numpy(axis).float() for axis in np.mgrid[0:side, 0:side])
        centre = torch.from_numpy(uniform(100, num, 2)).float() * side
        radius = 3 + 6 * torch.from_numpy(uniform(101, num)).float()
        away = (y - centre[:, 0, None, None]) ** 2 + (x - centre[:, 1, None, None]) ** 2
        disc = away < radius[:, None, None] ** 2
        angle = torch.from_numpy(uniform(102, num)).float()[:, None, None] * math.pi
        bars = torch.sin(0.9 * (x * angle.cos() + y * angle.sin())) > 0.3
        pictures = disc.float() + bars.float() * 0.8 + 0.7 * normal(103, num, side, side)
        super().__init__("masks", [pictures, disc], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Hourglass()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        pictures, disc = batch
        logits, wanted = model(pictures.unsqueeze(1)), disc.to(pictures.dtype)
        shares = torch.sigmoid(logits)
        dice = 1 - (2 * (shares * wanted).sum((1, 2)) + 1) / (shares.sum((1, 2)) + wanted.sum((1, 2)) + 1)
        return F.binary_cross_entropy_with_logits(logits, wanted) + dice.mean()
