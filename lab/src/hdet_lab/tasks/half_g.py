"""Tasks of still other kinds: languages, Latin, manual pages, hotels, deaths, electricity, WordNet, vortices, mazes.

Models have torch's own first weights, where nothing else is said. Sizes and lengths were chosen by what a fixed
learning rate needs in order to learn.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet_lab.tasks.base import Batch
from hdet_lab.tasks.half_c import shuffled
from hdet_lab.tasks.half_d import PhotographsTask, PlainTask, PostNorm, mlp, uniform
from hdet_lab.tasks.half_e import NUM_BYTES, NUM_LETTERS, Layer, later
from hdet_lab.tasks.half_f import Scale, TunesTask
from hdet_lab.tasks.packages import NUM_FIELDS_OF_MEANING, NUM_GLOSS_WORDS, NUM_LANGUAGES, read_arrays


class Polyglot(nn.Module):
    """A language for a string of bytes: layers with the norm last, the mean over places, a head."""

    def __init__(self, length: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(PostNorm(width, 4) for _ in range(num_layers)))
        self.head = nn.Linear(width, NUM_LANGUAGES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.symbols(x) + self.places.weight).mean(1))
        return out


class LanguagesTask(PlainTask):
    """In which of 64 languages Django says something, from 32 bytes: a transformer encoder of 0.12M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("languages", data, download=download)
        order = shuffled(len(arrays["letters"]))
        tensors = [torch.from_numpy(arrays[key][order]).long() for key in ("letters", "languages")]
        super().__init__("languages", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Polyglot(self.tensors[0].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, languages = batch
        return F.cross_entropy(model(letters), languages)


class Reader(nn.Module):
    """A GRU, step by step; gives all its states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen, self.back = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        states = []
        for here in self.seen(x).unbind(1):
            update, reset, new = here.chunk(3, -1)
            back_update, back_reset, back_new = self.back(state).chunk(3, -1)
            share = torch.sigmoid(update + back_update)
            state = share * state + (1 - share) * torch.tanh(new + torch.sigmoid(reset + back_reset) * back_new)
            states.append(state)
        return torch.stack(states, 1)


class Inflections(nn.Module):
    """The letters of a lemma from those of a word: two GRUs, the second of which looks at all states of the first."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.letters, self.before = nn.Embedding(NUM_LETTERS, width), nn.Embedding(NUM_LETTERS, width)
        self.encoder, self.decoder = Reader(width), Reader(width)
        self.key, self.join = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, NUM_LETTERS)

    def forward(self, letters: Tensor, before: Tensor) -> Tensor:
        x = self.letters(letters)
        seen = self.encoder(x, x[:, 0] * 0)
        states = self.decoder(self.before(before), seen[:, -1])
        scores = states @ self.key(seen).transpose(1, 2) / math.sqrt(states.shape[-1])
        shares = scores.masked_fill((letters == 0).unsqueeze(1), -1e9).softmax(-1)
        out: Tensor = self.head(torch.tanh(self.join(torch.cat([states, shares @ seen], -1))))
        return out


class LemmasTask(PlainTask):
    """Under which word a dictionary has a Latin one: GRUs with attention, 0.26M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("lemmas", data, download=download)  # in no order
        tensors = [torch.from_numpy(arrays[key]).long() for key in ("letters", "lemmas")]
        num = len(tensors[0])
        num_train = num - min(4096, num // 5)
        super().__init__("lemmas", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Inflections()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, lemmas = batch
        before, wanted = lemmas[:, :-1], lemmas[:, 1:]
        found = model(letters, before)
        asked = F.pad((before[:, 1:] > 0).to(found.dtype), (1, 0), value=1.0)  # up to the end of the word
        return (F.cross_entropy(found.transpose(1, 2), wanted, reduction="none") * asked).sum() / asked.sum()


class Selective(nn.Module):
    """A state that each place keeps, fades and reads as it finds fit (Mamba-2), as a matrix of places by places."""

    def __init__(self, width: int, num_heads: int = 6, num_states: int = 32) -> None:
        super().__init__()
        self.inner, self.num_heads, self.num_states = 2 * width, num_heads, num_states
        self.norm, self.last = Scale(width), Scale(self.inner)
        mixed = self.inner + 2 * num_states
        self.parts = nn.Linear(width, self.inner + mixed + num_heads, bias=False)
        self.near = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.out = nn.Linear(self.inner, width, bias=False)
        self.fade = nn.Parameter(torch.linspace(1, 16, num_heads).log())
        steps = torch.exp(math.log(1e-3) + torch.rand(num_heads) * math.log(100))
        self.step = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # as its authors draw it
        self.direct = nn.Parameter(torch.ones(num_heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        sizes = [self.inner, self.inner + 2 * self.num_states, self.num_heads]
        gate, mixed, steps = torch.split(self.parts(self.norm(x)), sizes, -1)
        mixed = F.silu(self.near(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        value, key, query = torch.split(mixed, [self.inner, self.num_states, self.num_states], -1)
        steps = F.softplus(steps + self.step)
        total = (-steps * self.fade.exp()).cumsum(1).transpose(1, 2)
        faded = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later(length, x.device), -1e9).exp()
        value = value.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
        given = value * steps.transpose(1, 2).unsqueeze(-1)
        found = (query @ key.transpose(1, 2)).unsqueeze(1) * faded @ given + value * self.direct.unsqueeze(-1)
        out: Tensor = x + self.out(self.last(found.transpose(1, 2).flatten(-2) * F.silu(gate)))
        return out


class Manual(nn.Module):
    """Bytes that come next, by selective states."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_BYTES, width)
        nn.init.normal_(self.symbols.weight, std=0.02)
        self.layers = nn.Sequential(*(Selective(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = Scale(width), nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.symbols(x))))
        return out


class ManualTask(TunesTask):
    """The next byte of manual pages: a selective state-space model (Mamba-2) of 0.25M parameters."""

    def plain_model(self) -> nn.Module:
        return Manual(**self.sizes)


def manual(data: str | Path = "data", *, download: bool = True, **sizes: int) -> ManualTask:
    """:class:`ManualTask` on the pages of Linux and the C library."""
    text = torch.from_numpy(read_arrays("manual", data, download=download)["text"])
    small = {"context": 64, "num_layers": 2, "width": 128, "num_heads": 4, "batch_rows": 8, "total_steps": 800}
    return ManualTask("manual", text, NUM_BYTES, **{**small, **sizes})


class Booking(nn.Module):
    """A price: a vector for the kind in each column, numbers, and an MLP."""

    def __init__(self, num_kinds: list[int], num_numbers: int, width: int = 8) -> None:
        super().__init__()
        self.kinds = nn.ModuleList([nn.Embedding(num, width) for num in num_kinds])
        self.head = mlp(width * len(num_kinds) + num_numbers, 128, 128, 1)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        found = [vectors(kind) for vectors, kind in zip(self.kinds, kinds.unbind(-1), strict=True)]
        out: Tensor = self.head(torch.cat([*found, numbers], -1))
        return out.squeeze(-1)


def standardised(numbers: NDArray[Any]) -> Tensor:
    """Columns with a mean of 0 and a deviation of 1."""
    numbers = numbers.astype(np.float64)
    return torch.from_numpy((numbers - numbers.mean(0)) / np.maximum(numbers.std(0), 1e-9)).float()


class HotelsTask(PlainTask):
    """What a night in a hotel costs, in euros as they are, by absolute error: embeddings, an MLP, 0.03M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1500, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("hotels", data, download=download)
        order = shuffled(len(arrays["prices"]))
        self.num_kinds = [int(most) + 1 for most in arrays["kinds"].max(0)]
        tensors = [
            torch.from_numpy(arrays["kinds"][order]).long(),
            standardised(arrays["numbers"][order]),
            torch.from_numpy(arrays["prices"][order]),
        ]
        super().__init__("hotels", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Booking(self.num_kinds, self.tensors[1].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        kinds, numbers, prices = batch
        return F.l1_loss(model(kinds, numbers), prices)


class SurvivalTask(PlainTask):
    """How likely people die in each of ten spans of two years: their hazards, from an MLP of 0.02M parameters.

    The loss is that of deaths which come at a constant rate within a span; who is lost from sight counts until then.
    """

    SPANS, YEARS = 10, 2.0

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 256, download: bool = True
    ) -> None:
        arrays = read_arrays("survival", data, download=download)
        order = shuffled(len(arrays["days"]))
        years, died = torch.from_numpy(arrays["days"][order]) / 365.25, torch.from_numpy(arrays["died"][order])
        spent = (years.unsqueeze(-1) - torch.arange(self.SPANS) * self.YEARS).clamp(0, self.YEARS)
        last = (years / self.YEARS).long().clamp(max=self.SPANS - 1)
        deaths = F.one_hot(last, self.SPANS) * died.unsqueeze(-1)
        tensors = [standardised(arrays["numbers"][order]), spent, deaths.float()]
        super().__init__("survival", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(self.tensors[0].shape[1], 128, 128, self.SPANS)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        numbers, spent, deaths = batch
        logs: Tensor = model(numbers)
        return (logs.exp() * spent - logs * deaths).sum(-1).mean()


class Forecast(nn.Module):
    """What comes in the last patches of a series: a transformer over patches, of which they lack what is asked."""

    def __init__(self, num_patches: int, size: int, num_asked: int, width: int = 96, num_layers: int = 3) -> None:
        super().__init__()
        self.num_asked = num_asked
        self.first, self.places = nn.Linear(3 * size, width), nn.Embedding(num_patches, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (series, patches, numbers)."""
        x = self.first(x) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x[:, -self.num_asked :]))
        return out.flatten(1)


class DemandTask(PlainTask):
    """A day's demand for electricity from three before, the weather and the calendar: a transformer, 0.34M parameters.

    The last fifth of the year validates.
    """

    PAST, AHEAD, PATCH = 144, 48, 8

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 16, download: bool = True
    ) -> None:
        hours = standardised(read_arrays("demand", data, download=download)["hours"])
        length = self.PAST + self.AHEAD
        windows = hours.unfold(0, length, 1).transpose(1, 2)
        num_train = len(windows) * 4 // 5
        starts = torch.cat([torch.arange(num_train - length), torch.arange(num_train, len(windows))])  # none in both
        sizes = {"total_steps": total_steps, "batch_rows": batch_rows}
        super().__init__("demand", [windows[starts]], num_train=num_train - length, **sizes)

    def plain_model(self) -> nn.Module:
        return Forecast((self.PAST + self.AHEAD) // self.PATCH, self.PATCH, self.AHEAD // self.PATCH)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (hours,) = batch
        known, wanted = hours[:, : self.PAST, 0], hours[:, self.PAST :, 0]
        seen = torch.cat([F.pad(known, (0, self.AHEAD)).unsqueeze(-1), hours[..., 1:]], -1)
        return F.mse_loss(model(seen.reshape(len(seen), -1, 3 * self.PATCH)), wanted)


class Senses(nn.Module):
    """A field for a meaning: the mean of its words, and twice what those it is linked to have (GraphSAGE)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_GLOSS_WORDS, width)
        self.first, self.second = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, NUM_FIELDS_OF_MEANING)

    def forward(self, words: Tensor) -> Tensor:
        """``words``: (meanings, itself and those linked, itself and those linked, words)."""
        there = (words > 0).unsqueeze(-1)
        x = (self.words(words) * there).sum(-2) / there.sum(-2).clamp(min=1)
        for layer in (self.first, self.second):
            x = F.relu(layer(torch.cat([x[..., 0, :], x[..., 1:, :].mean(-2)], -1)))
        out: Tensor = self.head(x)
        return out


class SensesTask(PlainTask):
    """In which of 45 fields a meaning of WordNet is, by its gloss and those linked: a graph network of 1.8M weights."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("senses", data, download=download)
        self.words = torch.from_numpy(read_arrays("wordnet", data, download=download)["words"])
        num = len(self.words)
        self.links = torch.from_numpy(np.concatenate([np.arange(num)[:, None], arrays["links"]], 1))
        order = shuffled(num)
        tensors = [torch.from_numpy(order), torch.from_numpy(arrays["fields"][order]).long()]
        num_train = num - min(4096, num // 5)
        super().__init__("senses", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def to(self, device: torch.device | str) -> SensesTask:
        super().to(device)
        self.words, self.links = self.words.to(device), self.links.to(device)
        return self

    def gather(self, rows: Tensor) -> Batch:
        meanings, fields = super().gather(rows)
        return self.words[self.links[self.links[meanings]]].long(), fields

    def plain_model(self) -> nn.Module:
        return Senses()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        words, fields = batch
        return F.cross_entropy(model(words), fields)


class Waves(nn.Module):
    """A linear map of the longest waves of a field, drawn as its authors do, and one of each point (FNO)."""

    def __init__(self, width: int, num_waves: int) -> None:
        super().__init__()
        self.num_waves = num_waves
        shape = 2, 2, width, width, num_waves, num_waves
        self.waves = nn.Parameter(torch.rand(shape) / width**2)
        self.points = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        num, (real, imaginary) = self.num_waves, self.waves.unbind(0)
        spectrum = torch.fft.rfft2(x)[..., :num]
        kept = torch.stack([spectrum[..., :num, :], spectrum[..., -num:, :]])

        def mapped(part: Tensor, weight: Tensor) -> Tensor:
            return torch.einsum("sbiyx,sioyx->sboyx", part, weight)

        reals = mapped(kept.real, real) - mapped(kept.imag, imaginary)
        imaginaries = mapped(kept.real, imaginary) + mapped(kept.imag, real)
        first, last = torch.complex(reals, imaginaries).unbind(0)
        between = torch.zeros_like(first[..., :1, :]).expand(*first.shape[:-2], x.shape[-2] - 2 * num, num)
        found = F.pad(torch.cat([first, between, last], -2), (0, x.shape[-1] // 2 + 1 - num))
        out: Tensor = torch.fft.irfft2(found, s=x.shape[-2:]) + self.points(x)
        return out


class Operator(nn.Module):
    """A field after some time: three layers of waves."""

    def __init__(self, width: int = 12, num_waves: int = 6, num_layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 1)
        self.layers = nn.ModuleList([Waves(width, num_waves) for _ in range(num_layers)])
        self.head = nn.Sequential(nn.Conv2d(width, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unsqueeze(1))
        for layer in self.layers:
            x = F.gelu(layer(x))
        out: Tensor = self.head(x)
        return out.squeeze(1)


def stirred(field: NDArray[Any], *, time: float, num_steps: int, viscosity: float) -> NDArray[Any]:
    """Vorticity on a torus of length one after some time (Navier and Stokes), by Heun's method on its waves."""
    side = field.shape[-1]
    y, x = 2 * np.pi * np.fft.fftfreq(side, 1 / side)[:, None], 2 * np.pi * np.fft.rfftfreq(side, 1 / side)
    square = x**2 + y**2
    kept = (np.abs(x) < 2 * np.pi * side / 3) & (np.abs(y) < 2 * np.pi * side / 3)
    inverse = np.where(square > 0, 1 / np.maximum(square, 1), 0)
    step = time / num_steps
    decay = np.exp(-viscosity * square * step)

    def change(spectrum: NDArray[Any]) -> NDArray[Any]:
        flow = spectrum * inverse
        parts = (1j * y * flow, -1j * x * flow, 1j * x * spectrum, 1j * y * spectrum)
        right, up, by_x, by_y = (np.fft.irfft2(part, s=(side, side)) for part in parts)
        return np.where(kept, -np.fft.rfft2(right * by_x + up * by_y), 0)

    spectrum = np.fft.rfft2(field)
    for _ in range(num_steps):
        first = change(spectrum)
        second = change(decay * (spectrum + step * first))
        spectrum = decay * spectrum + step / 2 * (decay * first + second)
    return np.asarray(np.fft.irfft2(spectrum, s=(side, side)))


class VorticesTask(PlainTask):
    """How a fluid has turned a moment later: a Fourier neural operator of 0.06M parameters on 24x24 points."""

    SIDE, TIME = 24, 0.24

    def __init__(self, *, total_steps: int = 600, batch_rows: int = 16, num: int = 2400) -> None:
        drawn = uniform(250, num, 2, 4, 9) * 2 - 1
        field = np.zeros((num, self.SIDE, self.SIDE))
        place = np.arange(self.SIDE) / self.SIDE * 2 * np.pi
        for down in range(4):
            for across in range(-4, 5):
                angle = down * place[:, None] + across * place
                size = 3 / (1 + down**2 + across**2) * (down**2 + across**2 > 0)
                for part, wave in enumerate((np.cos(angle), np.sin(angle))):
                    field += size * drawn[:, part, down, across + 4, None, None] * wave
        after = stirred(field, time=self.TIME, num_steps=8, viscosity=1e-3)
        tensors = [torch.from_numpy(np.round(array, 4)).float() for array in (field, after)]
        super().__init__("vortices", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Operator()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        before, after = batch
        return F.mse_loss(model(before), after)


class Residual(nn.Module):
    """Two convolutions, norms first, added to what was there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, width), nn.GroupNorm(4, width)])
        self.convolutions = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            found = convolution(F.relu(norm(found)))
        return x + found


class Walker(nn.Module):
    """Where to go from where one is: residual convolutions, and a head on what they find there."""

    def __init__(self, width: int = 24, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(num_blocks)))
        self.head = mlp(width, 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.blocks(self.first(x)) * x[:, 1:2]
        out: Tensor = self.head(found.sum((-2, -1)))
        return out


def distances(free: NDArray[Any], goal: NDArray[Any], most: int) -> NDArray[Any]:
    """How many moves each place of each maze is from the goal, ``most`` where there is no way."""
    away = np.where(goal, 0, most).astype(np.int16)
    for _ in range(most):
        around = np.pad(away, ((0, 0), (1, 1), (1, 1)), constant_values=most)
        near = np.minimum.reduce([around[:, 2:, 1:-1], around[:, :-2, 1:-1], around[:, 1:-1, 2:], around[:, 1:-1, :-2]])
        away = np.where(free, np.minimum(away, near + 1), most)
    return away


class MazesTask(PlainTask):
    """The next move of somebody who knows the shortest way through a maze (behaviour cloning): 0.03M parameters.

    Of moves that are equally good one is taken at random, and one move in twenty is any.
    """

    SIDE, MOST = 11, 60

    def __init__(self, *, total_steps: int = 600, batch_rows: int = 32, num: int = 30_000) -> None:
        side, rows = self.SIDE, np.arange(num)
        places = np.argsort(uniform(260, num, side * side), axis=1, kind="stable")
        free = (uniform(261, num, side, side) < 0.68).reshape(num, -1)
        free[rows[:, None], places[:, :2]] = True
        own, goal = (places[:, which, None] == np.arange(side * side) for which in (0, 1))
        planes = np.stack([free, own, goal], 1).reshape(num, 3, side, side)
        around = np.pad(
            distances(planes[:, 0], planes[:, 2], self.MOST), ((0, 0), (1, 1), (1, 1)), constant_values=self.MOST
        )
        y, x = places[:, 0] // side + 1, places[:, 0] % side + 1
        next_to = np.stack([around[rows, y + a, x + b] for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))], 1)
        move = np.argmin(next_to + uniform(262, num, 4), axis=1)
        move = np.where(uniform(263, num) < 0.05, (uniform(264, num) * 4).astype(np.int64), move)
        there = next_to.min(1) < self.MOST - 1
        tensors = [torch.from_numpy(array[there]) for array in (planes, move)]
        super().__init__("mazes", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Walker()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        planes, move = batch
        return F.cross_entropy(model(planes.float()), move)


class Grids(nn.Module):
    """A function of a place in space: numbers on four grids, first nearly zero, and a small MLP (Instant-NGP)."""

    SIDES = 4, 8, 16, 32

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.grids = nn.ModuleList([nn.Embedding((side + 1) ** 3, width) for side in self.SIDES])
        for grid in self.grids:
            assert isinstance(grid, nn.Embedding)
            nn.init.uniform_(grid.weight, -1e-4, 1e-4)
        self.head = mlp(width * len(self.SIDES), 64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (points, 3), from 0 to 1."""
        found = []
        corners = torch.stack(torch.meshgrid(*[torch.arange(2, device=x.device)] * 3, indexing="ij"), -1).view(8, 3)
        for side, grid in zip(self.SIDES, self.grids, strict=True):
            cell = (x * side).floor().clamp(0, side - 1)
            past = (x * side - cell).unsqueeze(1)
            share = torch.where(corners == 1, past, 1 - past).prod(-1, keepdim=True)
            a, b, c = (cell.long().unsqueeze(1) + corners).unbind(-1)
            found.append((grid((a * (side + 1) + b) * (side + 1) + c) * share).sum(1))
        out: Tensor = self.head(torch.cat(found, -1))
        return out.squeeze(-1)


class BodyTask(PlainTask):
    """How far a point is from a body of a ball, a ring and a box with dents: numbers on grids, 0.09M parameters."""

    def __init__(self, *, total_steps: int = 400, batch_rows: int = 1024, num: int = 100_000) -> None:
        places = np.round(uniform(270, num, 3), 4)
        at = places * 2 - 1
        x, y, z = at.T
        ball = np.linalg.norm(at - 0.35, axis=1) - 0.4
        ring = np.hypot(np.hypot(x + 0.1, z) - 0.6, y + 0.3) - 0.15
        beyond = np.abs(at - np.array([-0.5, 0.3, -0.3])) - np.array([0.25, 0.45, 0.2])
        box = np.linalg.norm(np.maximum(beyond, 0), axis=1) + np.minimum(beyond.max(1), 0)
        away = np.minimum(np.minimum(ball, ring), box) + 0.02 * np.sin(16 * x) * np.sin(16 * y) * np.sin(16 * z)
        tensors = [torch.from_numpy(array).float() for array in (places, np.round(away, 5))]
        super().__init__("body", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Grids()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        places, away = batch
        return F.l1_loss(model(places), away)


class Painter(nn.Module):
    """All patches of a photograph from those that are not hidden: a transformer."""

    def __init__(self, num_patches: int = 64, size: int = 48, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(size, width), nn.Parameter(0.02 * torch.randn(width))
        self.places = nn.Parameter(0.02 * torch.randn(num_patches, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = torch.where(hidden.unsqueeze(-1), self.hidden, self.first(x)) + self.places
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


class PatchesTask(PhotographsTask):
    """Photographs of which three in five patches are hidden, always the same: a transformer of 0.11M parameters."""

    NAME, STEPS, BATCH, SHARE = "patches", 600, 32, 0.6

    def __init__(self, data: str | Path = "data", **sizes: Any) -> None:
        super().__init__(data, **sizes)
        self.data_1 = torch.from_numpy(uniform(280, len(self.tensors[0]), 64) < self.SHARE)

    def plain_model(self) -> nn.Module:
        return Painter()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, hidden = batch
        wanted = images.reshape(-1, 8, 4, 8, 4, 3).transpose(2, 3).reshape(-1, 64, 48)
        lost = (model(wanted, hidden) - wanted).square().mean(-1)
        share = hidden.to(lost.dtype)
        loss: Tensor = (lost * share).sum() / share.sum().clamp(min=1.0)
        return loss
