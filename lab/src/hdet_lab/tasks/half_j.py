"""Tasks of other kinds again: Webster, Japanese, banners, births, lectures, glucose, stars, airports, wages, codes.

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
from hdet_lab.tasks.half_d import PlainTask, mlp, normal, uniform
from hdet_lab.tasks.half_e import Layer, later
from hdet_lab.tasks.half_f import TunesTask, turned
from hdet_lab.tasks.half_g import standardised
from hdet_lab.tasks.packages import (
    BANNER_COLUMNS,
    BANNER_ROWS,
    KANA,
    MAX_KANJI,
    NUM_BANNER_KINDS,
    NUM_KANJI,
    NUM_WORDS,
    read_arrays,
)


def scaled(x: Tensor) -> Tensor:
    """Numbers divided by the root of their mean square."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Parallel(nn.Module):
    """Attention and a hidden layer side by side, with norms that have no weights and a squared ReLU."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        seen = scaled(x)
        parts = self.qkv(seen).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        scores = turned(scaled(query)) @ turned(scaled(key)).transpose(-1, -2) / math.sqrt(query.shape[-1])
        shares = scores.masked_fill(later(x.shape[1], x.device), -1e9).softmax(-1)
        found = self.out((shares @ value).transpose(1, 2).flatten(-2))
        out: Tensor = x + found + self.down(F.relu(self.up(seen)).square())
        return out


class Lexicon(nn.Module):
    """Words that come next: a GPT whose layers first add nothing, and whose head is first zero."""

    def __init__(self, num_words: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(num_words, width), nn.Linear(width, num_words, bias=False)
        self.layers = nn.Sequential(*(Parallel(width, num_heads) for _ in range(num_layers)))
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(scaled(self.layers(self.tokens(x))))
        return out


class WebsterTask(TunesTask):
    """The next word of a dictionary: a GPT of 6.5M parameters, many of them first zero."""

    def plain_model(self) -> nn.Module:
        return Lexicon(self.vocabulary, **self.sizes)


def webster(data: str | Path = "data", *, download: bool = True, **sizes: int) -> WebsterTask:
    """:class:`WebsterTask` on Webster's of 1913."""
    words = torch.from_numpy(read_arrays("webster", data, download=download)["words"])
    small = {"context": 64, "num_layers": 3, "width": 256, "batch_rows": 8, "total_steps": 500}
    return WebsterTask("webster", words, NUM_WORDS, **{**small, **sizes})


class Sounds(nn.Module):
    """How a word is read: one transformer over the word, which sees itself both ways, and the sounds after it."""

    def __init__(self, num_sounds: int, width: int = 160, num_layers: int = 3) -> None:
        super().__init__()
        self.inputs, self.tokens = nn.Embedding(NUM_KANJI, width), nn.Embedding(KANA, width)
        self.positions = nn.Embedding(MAX_KANJI + num_sounds, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, KANA)

    def forward(self, words: Tensor, before: Tensor) -> Tensor:
        x = torch.cat([self.inputs(words), self.tokens(before)], 1)
        length = x.shape[1]
        x = x + self.positions.weight[:length]
        hidden = later(length, x.device) & (torch.arange(length, device=x.device) >= MAX_KANJI)
        for layer in self.layers:
            x = layer(x, hidden)
        out: Tensor = self.head(self.norm(x[:, MAX_KANJI:]))
        return out


class ReadingsTask(PlainTask):
    """How Japanese words are read, sound by sound: a transformer that sees the word both ways, 1.3M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 700, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("readings", data, download=download)  # in no order
        tensors = [torch.from_numpy(arrays[key]).long() for key in ("words", "kana")]
        num = len(tensors[0])
        num_train = num - min(4096, num // 5)
        super().__init__("readings", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Sounds(self.tensors[1].shape[1] - 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        words, kana = batch
        found, wanted = model(words, kana[:, :-1]), kana[:, 1:]
        asked = (wanted > 0).to(found.dtype)
        loss: Tensor = (F.cross_entropy(found.transpose(1, 2), wanted, reduction="none") * asked).sum() / asked.sum()
        return loss


class Squeezed(nn.Module):
    """A wide hidden layer, each number of it mixed with those beside it, weighed by what the whole has (MBConv)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 3 * width
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, wide), nn.Linear(wide, width)
        self.near = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.weigh = mlp(wide, width // 2, wide)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (pictures, rows, columns, width)."""
        found = F.silu(self.up(self.norm(x))).permute(0, 3, 1, 2)
        found = F.silu(self.near(found)).permute(0, 2, 3, 1)
        share = torch.sigmoid(self.weigh(found.mean((1, 2))))
        out: Tensor = x + self.down(found * share[:, None, None])
        return out


class Signs(nn.Module):
    """Which letter a banner is: a vector for each character, convolutions, and angles to a vector of each letter."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inputs = nn.Embedding(96, width)
        self.fine, self.join = Squeezed(width), nn.Linear(4 * width, 2 * width)
        self.coarse = nn.Sequential(Squeezed(2 * width), Squeezed(2 * width), Squeezed(2 * width))
        self.norm, self.all = nn.LayerNorm(2 * width), nn.Linear(BANNER_ROWS * BANNER_COLUMNS // 2 * width, 2 * width)
        self.head = nn.Linear(2 * width, NUM_BANNER_KINDS, bias=False)
        nn.init.orthogonal_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        found = self.fine(self.inputs(x))
        found = found.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # two by two
        found = self.all(self.norm(self.coarse(self.join(found))).flatten(1))
        return F.linear(F.normalize(found, dim=-1), F.normalize(self.head.weight, dim=-1))


class BannersTask(PlainTask):
    """Which letter a font of FIGlet draws: convolutions and cosines with a margin (CosFace), 1.2M parameters."""

    SHARP, MARGIN = 16.0, 0.1

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("banners", data, download=download)  # in no order
        tensors = [torch.from_numpy(arrays[key]).long() for key in ("drawn", "kinds")]
        super().__init__("banners", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Signs()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        drawn, kinds = batch
        found = model(drawn)
        right = kinds.unsqueeze(-1) == torch.arange(NUM_BANNER_KINDS, device=kinds.device)
        return F.cross_entropy(self.SHARP * (found - self.MARGIN * right.to(found.dtype)), kinds)


def calendar(days: NDArray[Any]) -> Tensor:
    """What is known of days after the first of 1969: a one, the day of the week, waves of a year, how many they are."""
    week = (days[:, None] % 7 == np.arange(7)) * 1.0
    angles = 2 * np.pi * days[:, None] / 365.25 * np.arange(1, 5)
    time = days[:, None] / 7305 * 2 - 1
    parts = [np.ones_like(time), week, np.cos(angles), np.sin(angles), time, time**2]
    return torch.from_numpy(np.concatenate(parts, 1)).float()


class BirthsTask(PlainTask):
    """How many are born on a day in each state of the USA: negative binomial, 19 weights for each state, drawn large.

    The logarithm of what is expected is linear in what is known of the day.
    """

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 400, batch_rows: int = 1024, download: bool = True
    ) -> None:
        arrays = read_arrays("births", data, download=download)
        order = shuffled(len(arrays["births"]))
        states, births = (torch.from_numpy(arrays[key][order].astype(np.int64)) for key in ("states", "births"))
        self.num_states = int(states.max()) + 1
        tensors = [states, calendar(arrays["days"][order].astype(np.int64)), births.float()]
        num_train = len(states) - min(20_000, len(states) // 5)
        super().__init__("births", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return nn.Embedding(self.num_states, self.tensors[1].shape[1] + 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        states, known, births = batch
        found = model(states)
        logs, spread = (found[:, :-1] * known).sum(-1), F.softplus(found[:, -1]) + 1e-3
        size = 1 / spread  # the variance is mean + spread * mean^2
        chance = (births + 1).lgamma() + size.lgamma() - (births + size).lgamma()
        share = torch.logaddexp(logs, size.log())
        loss: Tensor = (chance + (births + size) * share - births * logs - size * size.log()).mean()
        return loss


class Opinion(nn.Module):
    """How good a lecture is found: a number for each kind, and for each two of them (factorization machine).

    And how good one must be for each mark above the lowest.
    """

    def __init__(self, num_kinds: int, num_marks: int, width: int = 8) -> None:
        super().__init__()
        self.inputs, self.tokens = nn.Embedding(num_kinds, width), nn.Embedding(num_kinds, 1)
        for part in (self.inputs, self.tokens):
            nn.init.normal_(part.weight, std=0.1)
        self.first, self.steps = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(num_marks - 2))

    def forward(self, kinds: Tensor) -> Tensor:
        """Logits of a mark above each but the highest."""
        vectors = self.inputs(kinds)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(-1) / 2
        score = pairs + self.tokens(kinds).squeeze(-1).sum(-1)
        needed = torch.cat([self.first, self.first + F.softplus(self.steps).cumsum(0)])
        out: Tensor = score.unsqueeze(-1) - needed
        return out


class LecturesTask(PlainTask):
    """The mark a student gives a lecture, one of five in order: a factorization machine of 0.04M parameters."""

    MARKS = 5

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 450, batch_rows: int = 128, download: bool = True
    ) -> None:
        arrays = read_arrays("lectures", data, download=download)
        order = shuffled(len(arrays["marks"]))
        kinds = arrays["kinds"][order].astype(np.int64)
        sizes = kinds.max(0) + 1
        self.num_kinds = int(sizes.sum())
        tensors = [
            torch.from_numpy(kinds + np.cumsum(sizes) - sizes),
            torch.from_numpy(arrays["marks"][order]).long(),
        ]
        super().__init__("lectures", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Opinion(self.num_kinds, self.MARKS)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        kinds, marks = batch
        above = F.pad(torch.sigmoid(model(kinds)), (1, 0), value=1.0)
        shares = above - F.pad(above[:, 1:], (0, 1))
        return -shares.gather(1, marks.unsqueeze(-1)).clamp(min=1e-6).log().mean()


class Keeping(nn.Module):
    """Numbers that come after a series: a recurrent layer of ReLU that first keeps what it has (IRNN)."""

    def __init__(self, num_ahead: int, width: int = 100) -> None:
        super().__init__()
        self.seen, self.back = nn.Linear(1, width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, num_ahead)
        nn.init.eye_(self.back.weight)
        nn.init.normal_(self.seen.weight, std=1e-3)
        nn.init.zeros_(self.seen.bias)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen(x.unsqueeze(-1)).unbind(1)
        state = seen[0] * 0
        for here in seen:
            state = F.relu(here + self.back(state))
        out: Tensor = self.head(state)
        return out


class GlucoseTask(PlainTask):
    """An hour of glucose in blood from four before, every five minutes: 12,000 weights, some first the identity.

    The last fifth of 200 days validates.
    """

    PAST, AHEAD = 48, 12

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 16, download: bool = True
    ) -> None:
        arrays = read_arrays("glucose", data, download=download)
        length = self.PAST + self.AHEAD
        values = (torch.from_numpy(arrays["glucose"]).float() - 140) / 55
        minutes = torch.from_numpy(arrays["minutes"]).long()
        starts = torch.arange(len(values) - length + 1)
        starts = starts[(minutes[1:] - minutes[:-1] == 5).unfold(0, length - 1, 1).all(-1)]  # without gaps
        windows = values.unfold(0, length, 1)
        split = len(values) * 4 // 5
        before, after = starts[starts + length <= split], starts[starts >= split]
        sizes = {"total_steps": total_steps, "batch_rows": batch_rows, "num_train": len(before)}
        super().__init__("glucose", [windows[torch.cat([before, after])]], **sizes)

    def plain_model(self) -> nn.Module:
        return Keeping(self.AHEAD)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (values,) = batch
        return F.mse_loss(model(values[:, : self.PAST]), values[:, self.PAST :])


def spline_density(x: Tensor, wide: Tensor, high: Tensor, slopes: Tensor, least: float = 1e-3) -> Tensor:
    """The logarithm of how steep a monotone function of [0, 1] onto itself is (rational quadratic spline).

    ``x``: (rows,). ``wide``, ``high``: (rows, bins), any numbers that say how wide and high each bin is; ``slopes``:
    (rows, bins + 1), those at the ends of bins.
    """
    num = wide.shape[-1]
    wide, high = (least + (1 - least * num) * part.softmax(-1) for part in (wide, high))
    slopes = least + F.softplus(slopes)
    ends = wide.cumsum(-1)
    index = (x.unsqueeze(-1) >= ends[..., :-1]).sum(-1, keepdim=True)

    def taken(part: Tensor, index: Tensor = index) -> Tensor:
        return part.gather(-1, index).squeeze(-1)

    width, first, last = taken(wide), taken(slopes), taken(slopes, index + 1)
    place = ((x - taken(ends) + width) / width).clamp(0, 1)
    steep, rest = taken(high) / width, 1 - place
    across = place * rest
    over = steep.square() * (last * place.square() + 2 * steep * across + first * rest.square())
    found: Tensor = over.log() - 2 * (steep + (first + last - 2 * steep) * across).log()
    return found


class Ripples(nn.Module):
    """Numbers for a place as layers of sines (SIREN), the weights drawn as its authors do, the first slower."""

    SLOW, FAST = 8.0, 30.0

    def __init__(self, num_inputs: int, num_outputs: int, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_inputs, width), nn.Linear(width, width)
        self.out = nn.Linear(width, num_outputs)
        bound = math.sqrt(6 / width) / self.FAST
        for layer, size in ((self.first, 1 / num_inputs), (self.second, bound), (self.out, bound)):
            nn.init.uniform_(layer.weight, -size, size)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.sin(self.FAST * self.second(torch.sin(self.SLOW * self.first(x))))
        out: Tensor = self.out(found)
        return out


class Sky(nn.Module):
    """A density over four numbers, one after the other: splines, each from what came before."""

    NUM_BINS = 24

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        outputs = 3 * self.NUM_BINS + 1
        self.start = nn.Parameter(torch.zeros(outputs))
        self.layers = nn.ModuleList([Ripples(known, outputs) for known in range(1, num)])

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (rows, numbers), from 0 to 1."""
        total = x[:, 0] * 0
        for place, number in enumerate(x.unbind(-1)):
            known = 2 * x[:, :place] - 1
            found = self.layers[place - 1](known) if place else self.start.expand(len(x), -1)
            wide, high, slopes = torch.split(found, [self.NUM_BINS, self.NUM_BINS, self.NUM_BINS + 1], -1)
            total = total + spline_density(number, wide, high, slopes)
        return total


class StarsTask(PlainTask):
    """Where stars are, how bright, which colour: a spline flow made of sines, 0.08M parameters; in nats."""

    BRIGHTEST, FAINTEST, BLUEST, REDDEST = -1.5, 8.05, -0.5, 2.5

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 128, download: bool = True
    ) -> None:
        stars = read_arrays("stars", data, download=download)["stars"].astype(np.float64)
        stars = stars[shuffled(len(stars))]
        longitude, latitude, magnitude, colour = stars[stars[:, 3] < self.REDDEST].T
        parts = [
            (longitude + 180) / 360,
            (np.sin(np.radians(latitude)) + 1) / 2,
            (magnitude - self.BRIGHTEST) / (self.FAINTEST - self.BRIGHTEST),
            (colour - self.BLUEST) / (self.REDDEST - self.BLUEST),
        ]
        self.uniform = math.log(4 * math.pi * (self.FAINTEST - self.BRIGHTEST) * (self.REDDEST - self.BLUEST))
        numbers = torch.from_numpy(np.round(np.stack(parts, 1), 6)).float()
        super().__init__("stars", [numbers], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Sky()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        loss: Tensor = self.uniform - model(*batch).mean()
        return loss


class Relief(nn.Module):
    """A height from those around it: a network for each, weighed by attention of one query, and one for the sum."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.near, self.weigh = mlp(4, width, width, act=nn.SiLU), nn.Linear(width, 4)
        self.layers, self.head = nn.Linear(4 * width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (places, those around, numbers)."""
        found = F.silu(self.near(x))
        shares = self.weigh(found).softmax(1)
        pooled = (shares.transpose(1, 2) @ found).flatten(1)
        out: Tensor = self.head(F.silu(self.layers(pooled)))
        return out.squeeze(-1)


class HeightsTask(PlainTask):
    """How high an airport lies, in feet as they are, from the eight nearest: attention, 21,000 weights."""

    KILOMETRES = 6371.0

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 2000, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("heights", data, download=download)  # in no order
        feet, near, places = arrays["feet"], arrays["near"].astype(np.int64), arrays["places"].astype(np.float64)
        apart = places[near] - places[:, None]
        apart[..., 1] = (apart[..., 1] + 180) % 360 - 180
        apart[..., 1] *= np.cos(np.radians(places[:, :1]))
        apart = np.radians(apart) * self.KILOMETRES / 100
        away = np.log10(0.01 + np.hypot(apart[..., 0], apart[..., 1]))
        seen = np.concatenate([apart.clip(-5, 5), away[..., None], feet[near][..., None] / 1000], -1)
        tensors = [torch.from_numpy(np.round(seen, 4)).float(), torch.from_numpy(feet)]
        super().__init__("heights", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Relief()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        seen, feet = batch
        return F.l1_loss(model(seen), feet)


class Ternary(nn.Module):
    """A linear layer of weights of -1, 0 and 1 times one number, and a norm before (BitNet b1.58)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(before), nn.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        size = weight.abs().mean().clamp(min=1e-6)
        rounded = (weight / size).round().clamp(-1, 1) * size
        return F.linear(self.norm(x), weight + (rounded - weight).detach(), self.layer.bias)


class WagesTask(PlainTask):
    """The logarithm of a year's income in dollars: a network of 0.5M weights that are used as -1, 0 or 1."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 16, download: bool = True
    ) -> None:
        arrays = read_arrays("wages", data, download=download)
        order = shuffled(len(arrays["dollars"]))
        kinds = arrays["kinds"][order].T
        columns = [(kind[:, None] == np.arange(int(kind.max()) + 1)) * 1.0 for kind in kinds]
        known = torch.cat(
            [torch.from_numpy(np.concatenate(columns, 1)).float(), standardised(arrays["numbers"][order])], 1
        )
        dollars = np.log(arrays["dollars"][order].astype(np.float64))
        tensors = [known, torch.from_numpy(np.round(dollars, 6)).float()]
        super().__init__("wages", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        width = 512
        hidden = [part for _ in range(2) for part in (Ternary(width, width), nn.SiLU())]
        return nn.Sequential(nn.Linear(self.tensors[0].shape[1], width), nn.SiLU(), *hidden, nn.Linear(width, 1))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        known, dollars = batch
        return F.mse_loss(model(known).squeeze(-1), dollars)


class Unrolled(nn.Module):
    """Few numbers that make up many sums: steps towards them, each of which sets small ones to zero (LISTA)."""

    def __init__(self, num_sums: int, num_codes: int, num_steps: int = 8) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.seen, self.back = nn.Linear(num_sums, num_codes, bias=False), nn.Linear(num_codes, num_codes, bias=False)
        self.least = nn.Parameter(torch.full((num_codes,), 0.1))

    def forward(self, sums: Tensor) -> Tensor:
        seen = self.seen(sums)
        codes = self._shrunk(seen)
        for _ in range(self.num_steps - 1):
            codes = self._shrunk(seen + self.back(codes))
        return codes

    def _shrunk(self, x: Tensor) -> Tensor:
        return F.relu(x - self.least) - F.relu(-x - self.least)


class CodesTask(PlainTask):
    """Which few of 32 numbers are not zero, from 16 noisy sums of them: an unrolled search of 1,600 weights."""

    SUMS, CODES, SHARE, NOISE = 16, 32, 0.08, 0.02

    def __init__(self, *, total_steps: int = 5000, batch_rows: int = 8, num: int = 60_000) -> None:
        there = torch.from_numpy(uniform(400, num, self.CODES) < self.SHARE)
        codes = normal(401, num, self.CODES) * there
        parts = F.normalize(normal(403, self.CODES, self.SUMS).double(), dim=-1)
        sums = (codes.double() @ parts).float() + self.NOISE * normal(405, num, self.SUMS)
        tensors = [torch.from_numpy(np.round(sums.numpy(), 4)), codes]
        num_train = num - min(4096, num // 5)
        super().__init__("codes", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Unrolled(self.SUMS, self.CODES)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        sums, codes = batch
        loss: Tensor = (model(sums) - codes).square().sum(-1).mean()
        return loss
