"""Tasks of yet other kinds: the Bible, pronunciation, cities, noise in speech, larger photographs, boxes, motion.

Models have torch's own first weights. Sizes and lengths were chosen by what a fixed learning rate needs in order to
learn.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.tasks.base import Batch
from hdet_lab.tasks.half_c import shuffled
from hdet_lab.tasks.half_d import PhotographsTask, PlainTask, integers, mlp, normal, uniform
from hdet_lab.tasks.packages import NUM_COUNTRIES, NUM_PHONES, NUM_WORDS, read_arrays
from hdet_lab.tasks.text import TextTask

NUM_LETTERS = 27
NUM_CHARACTERS = 64
"""Of names of cities; 0 is none."""
NUM_BYTES = 128


def bible_gpt(data: str | Path = "data", *, download: bool = True, **sizes: int) -> TextTask:
    """Byte-level GPT on the King James Bible, 2.5M parameters."""
    text = torch.from_numpy(read_arrays("bible", data, download=download)["text"])
    small = {"context": 128, "num_layers": 4, "width": 224, "batch_rows": 16, "total_steps": 800}
    return TextTask("bible-gpt", text, NUM_BYTES, **{**small, **sizes})


class Recurrent(nn.Module):
    """Layers whose gates see the input only (minGRU), each with a norm before and a sum after."""

    def __init__(self, width: int = 256, num_layers: int = 2) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_BYTES, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(num_layers)])
        self.layers = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(num_layers)])
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            gate, new = layer(norm(x)).chunk(2, -1)
            share = torch.sigmoid(gate)
            states = []
            state = new[:, 0] * 0
            for kept, added in zip((1 - share).unbind(1), (share * new).unbind(1), strict=True):
                state = kept * state + added
                states.append(state)
            x = x + torch.stack(states, 1)
        out: Tensor = self.head(x)
        return out


class RecurrentTask(TextTask):
    """The next byte of the Bible from 48 before: a minGRU of 0.3M parameters."""

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Recurrent()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (symbols,) = batch
        return F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())


def bible_rnn(data: str | Path = "data", *, download: bool = True, **sizes: int) -> RecurrentTask:
    """:class:`RecurrentTask`."""
    text = torch.from_numpy(read_arrays("bible", data, download=download)["text"])
    small = {"context": 48, "batch_rows": 64, "total_steps": 600}
    return RecurrentTask("bible-rnn", text, NUM_BYTES, **{**small, **sizes})


class Attention(nn.Module):
    """What the places of one sequence take from those of another, or from earlier ones of the same."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.other, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        def heads(part: Tensor) -> Tensor:
            return part.view(*part.shape[:-1], self.num_heads, -1).transpose(-2, -3)

        key, value = (heads(part) for part in self.other(x if other is None else other).chunk(2, -1))
        query = heads(self.query(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        shares = (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-1)
        out: Tensor = self.out((shares @ value).transpose(-2, -3).flatten(-2))
        return out


class Layer(nn.Module):
    """A layer of a transformer, norms first; with ``crossed`` it looks at another sequence too."""

    def __init__(self, width: int, *, crossed: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3 if crossed else 2)])
        self.own, self.feed = Attention(width), mlp(width, 4 * width, width, act=nn.GELU)
        self.crossed = Attention(width) if crossed else None

    def forward(self, x: Tensor, hidden: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norms[0](x), hidden=hidden)
        if self.crossed is not None:
            x = x + self.crossed(self.norms[1](x), other)
        out: Tensor = x + self.feed(self.norms[-1](x))
        return out


def later(length: int, device: torch.device) -> Tensor:
    """Which places a place must not see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


class Speller(nn.Module):
    """Sounds of a word, one after the other, from its letters: encoder and decoder."""

    def __init__(self, length: int, width: int = 96) -> None:
        super().__init__()
        self.letters, self.phones = nn.Embedding(NUM_LETTERS, width), nn.Embedding(NUM_PHONES, width)
        self.places = nn.Embedding(length, width)
        self.encoder = nn.ModuleList([Layer(width), Layer(width)])
        self.decoder = nn.ModuleList([Layer(width, crossed=True), Layer(width, crossed=True)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_PHONES)

    def forward(self, letters: Tensor, before: Tensor) -> Tensor:
        seen = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for layer in self.encoder:
            seen = layer(seen)
        x = self.phones(before) + self.places.weight[: before.shape[1]]
        for layer in self.decoder:
            x = layer(x, later(before.shape[1], x.device), seen)
        out: Tensor = self.head(self.norm(x))
        return out


class PhonemesTask(PlainTask):
    """How a word is pronounced (CMUdict): a transformer with encoder and decoder, 0.53M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 128, download: bool = True
    ) -> None:
        arrays = read_arrays("phonemes", data, download=download)
        order = shuffled(len(arrays["letters"]))
        tensors = [torch.from_numpy(arrays[key][order]).long() for key in ("letters", "phones")]
        num_train = len(order) - min(4000, len(order) // 5)
        super().__init__("phonemes", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Speller(max(tensor.shape[1] for tensor in self.tensors))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, phones = batch
        found, wanted = model(letters, phones[:, :-1]), phones[:, 1:]
        share = (wanted > 0).to(found.dtype)
        return (F.cross_entropy(found.transpose(1, 2), wanted, reduction="none") * share).sum() / share.sum()


class Characters(nn.Module):
    """A country for a name: convolutions over characters, the largest of each."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_CHARACTERS, 32)
        self.first, self.second = nn.Conv1d(32, width, 3, padding=1), nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, NUM_COUNTRIES)

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.first(self.symbols(x).transpose(1, 2)))
        out: Tensor = self.head(F.relu(self.second(found)).amax(-1))
        return out


class CitiesTask(PlainTask):
    """The country of a city from its name (GeoNames): convolutions over characters, 0.07M parameters."""

    NAME, KEY = "cities", "names"

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 256, download: bool = True
    ) -> None:
        arrays = read_arrays("cities", data, download=download)
        order = shuffled(len(arrays["countries"]))
        seen, country = (torch.from_numpy(arrays[key][order]) for key in (self.KEY, "countries"))
        seen = seen if seen.is_floating_point() else seen.long()
        super().__init__(self.NAME, [seen, country.long()], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Characters()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        seen, country = batch
        return F.cross_entropy(model(seen), country)


class CountriesTask(CitiesTask):
    """The country of a place from latitude and longitude, in degrees as they are: an MLP of 0.15M parameters."""

    NAME, KEY = "countries", "places"

    def plain_model(self) -> nn.Module:
        return mlp(2, 256, 256, 256, NUM_COUNTRIES, act=nn.SiLU)


class Denoiser(nn.Module):
    """What is noise in a signal: convolutions that look ever further, each added to what was there."""

    def __init__(self, width: int = 48, num_layers: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 5, padding=2), nn.Conv1d(width, 1, 1)
        self.layers = nn.ModuleList(
            [nn.Conv1d(width, width, 3, padding=2**place, dilation=2**place) for place in range(num_layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x.unsqueeze(1))
        for layer in self.layers:
            found = found + F.gelu(layer(found))
        out: Tensor = self.last(found)
        return out.squeeze(1)


class DenoiseTask(PlainTask):
    """Speech under noise, 512 samples: convolutions of 0.04M parameters; the logarithm of the error's power."""

    LENGTH = 512

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 32, download: bool = True
    ) -> None:
        samples = read_arrays("speech", data, download=download)["samples"].astype(np.float64)
        loud = samples / 127.5 - 1
        wave = np.sign(loud) * np.expm1(np.abs(loud) * math.log(256)) / 255
        rows = wave[: len(wave) // self.LENGTH * self.LENGTH].reshape(-1, self.LENGTH)
        rows = rows[shuffled(len(rows))]
        clean = torch.from_numpy(rows / np.maximum(rows.std(1, keepdims=True), 1e-3)).float()
        noise = 0.5 * normal(110, *clean.shape)
        super().__init__("denoise", [clean, noise], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Denoiser()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        clean, noise = batch
        error: Tensor = (model(clean + noise) - noise).square().mean(-1)
        return (error + 1e-3).log().mean() + math.log(1e3)


class Upscaler(nn.Module):
    """A photograph of twice the side: residual convolutions without a norm, and pixels out of channels."""

    def __init__(self, width: int = 48, num_layers: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 12, 3, padding=1)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
                for _ in range(num_layers)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        for layer in self.layers:
            found = found + layer(found)
        blown = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
        return blown + F.pixel_shuffle(self.last(found), 2)


class UpscaleTask(PhotographsTask):
    """Photographs from such of half their side, by absolute error: 0.17M parameters."""

    NAME, STEPS, BATCH = "upscale", 500, 32

    def plain_model(self) -> nn.Module:
        return Upscaler()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images = batch[0].permute(0, 3, 1, 2)
        return F.l1_loss(model(F.avg_pool2d(images, 2)), images)


class ConvNextBlock(nn.Module):
    """Wide convolutions of each channel, a norm, a hidden layer, and a share that starts near zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.feed = nn.LayerNorm(width), mlp(width, 4 * width, width, act=nn.GELU)
        self.share = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.feed(self.norm(self.spread(x).permute(0, 2, 3, 1))) * self.share
        return x + found.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Patches of four by four, blocks, a norm over the mean, a head."""

    def __init__(self, width: int = 112, num_layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(ConvNextBlock(width) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.patches(x.permute(0, 3, 1, 2))).mean((2, 3))))
        return out


class ConvNextTask(PhotographsTask):
    """Photographs for a ConvNeXt of 0.4M parameters with layer scale; labels are smoothed."""

    NAME, STEPS = "convnext", 600

    def plain_model(self) -> nn.Module:
        return ConvNext()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)


class Finder(nn.Module):
    """Kind and box of what a picture shows: strided convolutions, and two heads on all of what they find."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()) for a, b in pairwise((1, 16, 32, 64))
        ]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())
        self.kind, self.box = nn.Linear(128, num_kinds), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)
        return self.kind(found), self.box(found)


class BoxesTask(PlainTask):
    """Which of three things is in a noisy picture, and where: two losses at once, 0.15M parameters."""

    def __init__(self, *, total_steps: int = 700, batch_rows: int = 64, num: int = 20_000, side: int = 32) -> None:
        y, x = (torch.from_numpy(axis).float() for axis in np.mgrid[0:side, 0:side])
        sizes = 4 + 6 * torch.from_numpy(uniform(120, num, 2)).float()
        centres = sizes + torch.from_numpy(uniform(121, num, 2)).float() * (side - 2 * sizes)
        kind = integers(122, 3, num)
        down, across = (
            (axis - centres[:, place, None, None]).abs() / sizes[:, place, None, None]
            for place, axis in enumerate((y, x))
        )
        shapes = torch.stack([torch.maximum(down, across), (down**2 + across**2).sqrt(), down + across], 1)
        inside = shapes.gather(1, kind[:, None, None, None].expand(-1, 1, side, side)).squeeze(1) < 1
        pictures = inside.float() + 0.8 * normal(123, num, side, side)
        boxes = torch.cat([centres, sizes], 1) / side
        super().__init__("boxes", [pictures, kind, boxes], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Finder(3)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        pictures, kind, boxes = batch
        kinds, found = model(pictures.unsqueeze(1))
        return F.cross_entropy(kinds, kind) + 10 * F.smooth_l1_loss(found, boxes, beta=0.05)


class Tokens(nn.Module):
    """A number from the columns of a table: each is a token of a transformer (FT-Transformer)."""

    def __init__(self, num_columns: int, width: int = 64) -> None:
        super().__init__()
        self.scale, self.shift = nn.Embedding(num_columns, width), nn.Embedding(num_columns + 1, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width), Layer(width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.pad(x.unsqueeze(-1) * self.scale.weight, (0, 0, 1, 0)) + self.shift.weight
        for layer in self.layers:
            columns = layer(columns)
        out: Tensor = self.head(self.norm(columns[:, 0]))
        return out.squeeze(-1)


class TokensTask(PlainTask):
    """The logarithm of what a diamond costs, from standardised columns: an FT-Transformer of 0.15M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 128, download: bool = True
    ) -> None:
        arrays = read_arrays("diamonds", data, download=download)
        order = shuffled(len(arrays["targets"]))
        columns, price = arrays["inputs"][order].astype(np.float64), np.log(arrays["targets"][order].astype(np.float64))
        tensors = [
            torch.from_numpy((array - array.mean(0)) / np.maximum(array.std(0), 1e-9)).float()
            for array in (columns, price)
        ]
        super().__init__("tokens", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Tokens(self.tensors[0].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        columns, price = batch
        return F.mse_loss(model(columns), price)


class Experts(nn.Module):
    """A hidden layer as eight experts, of which each place takes two; gives how unevenly they are used, too."""

    def __init__(self, width: int, num: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num, bias=False)
        self.experts = nn.ModuleList([mlp(width, width, width, act=nn.GELU) for _ in range(num)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        second = logits.topk(2, -1).values[..., 1:]
        shares = logits.masked_fill(logits < second.detach(), -1e9).softmax(-1)
        found = sum(shares[..., place, None] * expert(x) for place, expert in enumerate(self.experts))
        used, wanted = (shares > 0).to(x.dtype).mean((0, 1)), logits.softmax(-1).mean((0, 1))
        return found, (used * wanted).sum() * len(self.experts) / 2


class Mixture(nn.Module):
    """Words that come next: attention and experts, twice."""

    def __init__(self, length: int, width: int = 96) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        self.attention = nn.ModuleList([Attention(width), Attention(width)])
        self.experts = nn.ModuleList([Experts(width), Experts(width)])
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(words) + self.places.weight
        uneven = x.new_zeros(())
        for place in range(2):
            x = x + self.attention[place](self.norms[2 * place](x), hidden=later(x.shape[1], x.device))
            found, more = self.experts[place](self.norms[2 * place + 1](x))
            x, uneven = x + found, uneven + more
        return self.head(self.norms[4](x)), uneven


class ExpertsTask(PlainTask):
    """The next word of WikiText-2: a transformer whose hidden layers are mixtures of experts, 2M parameters."""

    LENGTH = 32

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 32, download: bool = True
    ) -> None:
        words = torch.from_numpy(read_arrays("wikitext", data, download=download)["words"]).long()
        rows = words[: (len(words) - 1) // self.LENGTH * self.LENGTH + 1].unfold(0, self.LENGTH + 1, self.LENGTH)
        super().__init__("experts", [rows.contiguous()], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Mixture(self.LENGTH)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (words,) = batch
        found, uneven = model(words[:, :-1])
        loss: Tensor = F.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten()) + 0.01 * uneven
        return loss


def swing(state: Any, force: Any, step: float) -> Any:
    """The state after a step of time, by the classical method of Runge and Kutta."""
    first = force(state)
    second = force(state + step / 2 * first)
    third = force(state + step / 2 * second)
    return state + step / 6 * (first + 2 * second + 2 * third + force(state + step * third))


def two_rods(state: Any) -> Any:
    """How the angles and speeds of a double pendulum change, with all lengths and masses one and a gravity of 9.81."""
    (a, b, da, db), g = np.moveaxis(state, -1, 0), 9.81
    apart = a - b
    below = 3 - np.cos(2 * apart)
    first = -3 * g * np.sin(a) - g * np.sin(a - 2 * b) - 2 * np.sin(apart) * (db**2 + da**2 * np.cos(apart))
    second = 2 * np.sin(apart) * (2 * da**2 + 2 * g * np.cos(a) + db**2 * np.cos(apart))
    return np.stack([da, db, first / below, second / below], -1)


class PendulumTask(PlainTask):
    """Half a second of a double pendulum: an MLP says how it moves, through ten steps of Runge and Kutta."""

    STEPS, TIME = 10, 0.05

    def __init__(self, *, total_steps: int = 800, batch_rows: int = 64, num: int = 20_000) -> None:
        state = (uniform(130, num, 4) * 2 - 1) * np.array([2.0, 2.0, 2.0, 2.0])
        path = [state]
        for _ in range(self.STEPS):
            for _ in range(5):
                state = swing(state, two_rods, self.TIME / 5)
            path.append(state)
        tensors = [torch.from_numpy(np.round(np.stack(path, 1), 5)).float()]
        super().__init__("pendulum", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(4, 128, 128, 4, act=nn.Tanh)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (path,) = batch
        state, errors = path[:, 0], []
        for wanted in path.unbind(1)[1:]:
            state = swing(state, model, self.TIME)
            errors.append((state - wanted).square().mean())
        return torch.stack(errors).mean()


class Cloud(nn.Module):
    """Which shape points lie on: a layer for each point, the largest of all, a layer for them (PointNet)."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.point, self.head = mlp(3, 64, 128, 256), mlp(256, 128, num_kinds)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.point(x)).amax(1))
        return out


class CloudsTask(PlainTask):
    """Which of six surfaces 48 noisy points lie on, turned at random: PointNet, 0.08M parameters."""

    NUM_POINTS = 48

    def __init__(self, *, total_steps: int = 1000, batch_rows: int = 128, num: int = 24_000) -> None:
        u, v = (torch.from_numpy(uniform(seed, num, self.NUM_POINTS)).float() for seed in (140, 141))
        around, kind = 2 * math.pi * u, integers(142, 6, num)
        up = 2 * v - 1
        flat = (1 - up**2).sqrt()
        cos, sin = around.cos(), around.sin()
        tube = 1 + 0.4 * (2 * math.pi * v).cos()
        surfaces = [
            torch.stack([flat * cos, flat * sin, up], -1),
            torch.stack([0.8 * cos, 0.8 * sin, up], -1),
            torch.stack([(1 - v) * cos, (1 - v) * sin, up], -1),
            torch.stack([tube * cos, tube * sin, 0.4 * (2 * math.pi * v).sin()], -1) * 0.8,
            torch.stack([2 * u - 1, up, 0.4 * (6 * u).sin()], -1),
            torch.stack([0.7 * (2 * around).cos(), 0.7 * (2 * around).sin(), 2 * u - 1], -1),
        ]
        points = (
            torch.stack(surfaces, 1).gather(1, kind[:, None, None, None].expand(-1, 1, self.NUM_POINTS, 3)).squeeze(1)
        )
        turns = torch.linalg.qr(normal(143, num, 3, 3).double())[0].float()
        points = points @ turns + 0.12 * normal(145, num, self.NUM_POINTS, 3)
        super().__init__("clouds", [points, kind], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Cloud(6)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        points, kind = batch
        return F.cross_entropy(model(points), kind)


class Tastes(nn.Module):
    """How much a user likes a film: vectors of small numbers, and what a film has for everybody."""

    def __init__(self, num_users: int, num_films: int, width: int = 32) -> None:
        super().__init__()
        self.users, self.films, self.all = (
            nn.Embedding(num_users, width), nn.Embedding(num_films, width), nn.Embedding(num_films, 1)
        )  # fmt: skip
        for part in (self.users, self.films, self.all):
            nn.init.normal_(part.weight, std=0.1)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        found: Tensor = (self.users(users) * self.films(films)).sum(-1) + self.all(films).squeeze(-1)
        return found


class RankingTask(PlainTask):
    """Which of two films a user has rated and which was drawn (MovieLens; BPR): 0.32M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 512, download: bool = True
    ) -> None:
        arrays = read_arrays("movielens", data, download=download)
        order = shuffled(len(arrays["ratings"]))
        users, films = (torch.from_numpy(arrays[key][order]).long() for key in ("users", "films"))
        self.sizes = int(users.max()) + 1, int(films.max()) + 1
        drawn = integers(150, self.sizes[1], len(films))
        super().__init__("ranking", [users, films, drawn], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Tastes(*self.sizes)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        users, films, drawn = batch
        return F.softplus(model(users, drawn) - model(users, films)).mean()
