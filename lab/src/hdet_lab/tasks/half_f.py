"""Tasks of further kinds: folk tunes, JavaScript, Czech, WordNet, digits, a pen, baseball, equations, control.

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
from hdet_lab.tasks.half_d import PhotographsTask, PlainTask, mlp, normal, uniform
from hdet_lab.tasks.half_e import NUM_BYTES, Layer, later
from hdet_lab.tasks.packages import NUM_GLOSS_WORDS, NUM_LEMMA_CHARACTERS, NUM_MARKS, read_arrays
from hdet_lab.tasks.text import TextTask


class Scale(nn.Module):
    """Numbers divided by the root of their mean square (RMSNorm), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def turned(x: Tensor) -> Tensor:
    """Pairs of numbers, turned by angles that grow with the place (rotary positions)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 1e4 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(length, device=x.device, dtype=x.dtype).unsqueeze(-1) * speeds
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


class ModernLayer(nn.Module):
    """Attention with rotary positions and a gated hidden layer (SwiGLU), without biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, hidden = num_heads, width * 8 // 3
        self.norms = nn.ModuleList([Scale(width), Scale(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        scores = turned(query) @ turned(key).transpose(-1, -2) / math.sqrt(query.shape[-1])
        shares = scores.masked_fill(later(x.shape[1], x.device), -1e9).softmax(-1)
        x = x + self.out((shares @ value).transpose(1, 2).flatten(-2))
        gate, found = self.up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * found)
        return out


class ModernGpt(nn.Module):
    """A GPT of today's make; the same matrix, first drawn small, reads symbols and names them."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_BYTES, width)
        nn.init.normal_(self.symbols.weight, std=0.02)
        self.layers = nn.Sequential(*(ModernLayer(width, num_heads) for _ in range(num_layers)))
        self.norm = Scale(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.layers(self.symbols(x))), self.symbols.weight)


class TunesTask(TextTask):
    """The next character of a folk tune: a GPT of 3.2M parameters with RMSNorm, SwiGLU, rotary positions."""

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.plain_model()

    def plain_model(self) -> nn.Module:
        return ModernGpt(**self.sizes)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (symbols,) = batch
        return F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())


def tunes_gpt(data: str | Path = "data", *, download: bool = True, **sizes: int) -> TunesTask:
    """:class:`TunesTask` on the ABC collections of music21."""
    text = torch.from_numpy(read_arrays("tunes", data, download=download)["text"])
    small = {"context": 128, "num_layers": 4, "width": 256, "batch_rows": 16, "total_steps": 600}
    return TunesTask("tunes-gpt", text, NUM_BYTES, **{**small, **sizes})


class RetentionLayer(nn.Module):
    """Attention without a softmax, which forgets at a rate of its own in each head (RetNet), and a hidden layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.parts, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.feed = mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(self.norms[0](x)).chunk(4, -1)
        gate, query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        ages = places.unsqueeze(-1) - places
        rates = torch.log1p(-(2.0 ** -(2 + torch.arange(self.num_heads, device=x.device, dtype=x.dtype))))
        kept = (ages.clamp(min=0) * rates[:, None, None]).exp() * (ages >= 0)
        found = turned(query) @ turned(key).transpose(-1, -2) / math.sqrt(query.shape[-1]) * kept @ value
        found = F.silu(gate) * F.layer_norm(found, found.shape[-1:])
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class Retention(nn.Module):
    """Bytes that come next, by retention."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_BYTES, width)
        self.layers = nn.Sequential(*(RetentionLayer(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.symbols(x))))
        return out


class JavascriptTask(TunesTask):
    """The next byte of JavaScript: a linear attention that forgets, 0.7M parameters."""

    def plain_model(self) -> nn.Module:
        return Retention(**self.sizes)


def javascript(data: str | Path = "data", *, download: bool = True, **sizes: int) -> JavascriptTask:
    """:class:`JavascriptTask` on the source of three.js."""
    text = torch.from_numpy(read_arrays("javascript", data, download=download)["text"])
    small = {"context": 96, "num_layers": 3, "width": 128, "batch_rows": 32, "total_steps": 500}
    return JavascriptTask("javascript", text, NUM_BYTES, **{**small, **sizes})


class BothWays(nn.Module):
    """The mark of each letter: an LSTM from the left and one from the right, side by side."""

    def __init__(self, width: int = 96, num_inputs: int = 48) -> None:
        super().__init__()
        self.width = width
        self.letters = nn.Embedding(NUM_BYTES, num_inputs)
        bound = 1 / math.sqrt(width)
        self.seen = nn.Parameter(torch.empty(2, num_inputs, 4 * width).uniform_(-bound, bound))
        self.before = nn.Parameter(torch.empty(2, width, 4 * width).uniform_(-bound, bound))
        self.shift = nn.Parameter(torch.empty(2, 1, 4 * width).uniform_(-bound, bound))
        self.head = nn.Linear(2 * width, NUM_MARKS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters)
        both = torch.stack([x, x.flip(1)]).flatten(1, 2)
        inputs = (both @ self.seen + self.shift).view(2, *x.shape[:2], -1)
        state = memory = inputs[:, :, 0, : self.width] * 0
        states = []
        for given in inputs.unbind(2):
            let_in, keep, show, new = (given + state @ self.before).chunk(4, -1)
            memory = torch.sigmoid(keep) * memory + torch.sigmoid(let_in) * torch.tanh(new)
            state = torch.sigmoid(show) * torch.tanh(memory)
            states.append(state)
        left, right = torch.stack(states, 2).unbind(0)
        out: Tensor = self.head(torch.cat([left, right.flip(1)], -1))
        return out


class AccentsTask(PlainTask):
    """Which marks letters of Czech have that was written without: an LSTM both ways, 0.12M parameters."""

    LENGTH = 32

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("czech", data, download=download)
        num = len(arrays["letters"]) // self.LENGTH
        order = shuffled(num)
        letters, marks = (
            torch.from_numpy(arrays[key][: num * self.LENGTH].reshape(num, -1)[order]).long()
            for key in ("letters", "marks")
        )
        marked = torch.zeros(NUM_BYTES, dtype=torch.bool)
        marked[[ord(letter) for letter in "acdeinorstuyzACDEINORSTUYZ"]] = True
        super().__init__("accents", [letters, marks, marked[letters]], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return BothWays()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, marks, asked = batch
        found = model(letters)
        share = asked.to(found.dtype)
        return (F.cross_entropy(found.transpose(1, 2), marks, reduction="none") * share).sum() / share.sum()


class Towers(nn.Module):
    """Words and meanings on one sphere: convolutions over characters, the mean of words."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.words = nn.Embedding(NUM_LEMMA_CHARACTERS, 32), nn.Embedding(NUM_GLOSS_WORDS, width)
        self.first, self.second = nn.Conv1d(32, 128, 3, padding=1), nn.Conv1d(128, 128, 3, padding=1)
        self.name, self.meaning = nn.Linear(128, width), mlp(width, 128, width)
        self.sharp = nn.Parameter(torch.full((1,), math.log(10)))

    def forward(self, letters: Tensor, words: Tensor) -> Tensor:
        found = F.relu(self.first(self.letters(letters).transpose(1, 2)))
        names = F.normalize(self.name(F.relu(self.second(found)).amax(-1)), dim=-1)
        there = (words > 0).to(names.dtype).unsqueeze(-1)
        mean = (self.words(words) * there).sum(1) / there.sum(1).clamp(min=1)
        logits: Tensor = self.sharp.exp() * names @ F.normalize(self.meaning(mean), dim=-1).transpose(-1, -2)
        return logits


class GlossesTask(PlainTask):
    """Which word has which meaning in WordNet, among those of a batch: two towers (CLIP's loss), 0.47M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 512, download: bool = True
    ) -> None:
        arrays = read_arrays("wordnet", data, download=download)
        order = shuffled(len(arrays["letters"]))
        tensors = [torch.from_numpy(arrays[key][order]).long() for key in ("letters", "words")]
        num_train = len(order) - min(4096, len(order) // 5)
        super().__init__("glosses", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Towers()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model(*batch)
        right = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


class DigitsTask(PhotographsTask):
    """Handwritten digits of MNIST, from 0 to 1; a subclass says how the task is called, and how long it is."""

    BATCH, SET = 32, "digits"

    def scaled(self, images: Tensor) -> Tensor:
        """Of bytes."""
        return images / 255


class NormedBlock(nn.Module):
    """Two convolutions with GroupNorm, added to what was there."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, after), nn.GroupNorm(8, after)])
        self.past = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(self.past(x) + found)


class Twin(nn.Module):
    """Where a digit lies among others, in 16 numbers: a ResNet with GroupNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            NormedBlock(width, width, 1), NormedBlock(width, 2 * width, 2), NormedBlock(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.first(x.unsqueeze(-3))).mean((-2, -1)))
        return out


def partners(labels: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """For each row another one, half of the time of the same label."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts, drawn = np.cumsum(counts) - counts, uniform(seed, len(labels))
    alike = order[starts[labels] + (drawn * counts[labels]).astype(np.int64)]
    return np.where(uniform(seed + 1, len(labels)) < 0.5, alike, (drawn * len(labels)).astype(np.int64))


class SiameseTask(DigitsTask):
    """Two digits, near if they are the same and a distance of 1 apart if not: a ResNet of 0.08M parameters."""

    NAME, STEPS, BATCH = "siamese", 600, 32

    def __init__(self, data: str | Path = "data", **sizes: Any) -> None:
        super().__init__(data, **sizes)
        labels = self.tensors[1].numpy()
        train, validation = np.split(labels, [self.num_train])
        self.others = torch.from_numpy(
            np.concatenate([partners(train, 200), self.num_train + partners(validation, 202)])
        )

    def to(self, device: torch.device | str) -> SiameseTask:
        super().to(device)
        self.others = self.others.to(device)
        return self

    def gather(self, rows: Tensor) -> Batch:
        images, labels = super().gather(rows)
        others, found = super().gather(self.others[rows.to(self.others.device)])
        return images, others, labels == found

    def plain_model(self) -> nn.Module:
        return Twin()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, others, same = batch
        first, second = model(torch.cat([images, others])).chunk(2)
        away: Tensor = ((first - second).square().sum(-1) + 1e-6).sqrt()
        return torch.where(same, away.square(), (1 - away).clamp(min=0).square()).mean()


class Velocity(nn.Module):
    """How a picture on its way from noise goes on: a transformer of patches with long skips (U-ViT)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(16, width), mlp(1, width, width, act=nn.SiLU)
        self.places = nn.Parameter(0.02 * torch.randn(49, width))
        self.down, self.middle = nn.ModuleList([Layer(width), Layer(width)]), Layer(width)
        self.up = nn.ModuleList([Layer(width), Layer(width)])
        self.skips = nn.ModuleList([nn.Linear(2 * width, width), nn.Linear(2 * width, width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x``: (pictures, 49 patches, 16 pixels); ``time``: (pictures, 1, 1)."""
        found = torch.cat([self.time(time), self.patches(x) + self.places], 1)
        past = []
        for layer in self.down:
            found = layer(found)
            past.append(found)
        found = self.middle(found)
        for layer, skip in zip(self.up, self.skips, strict=True):
            found = layer(skip(torch.cat([found, past.pop()], -1)))
        out: Tensor = self.head(self.norm(found[:, 1:]))
        return out


class FlowTask(DigitsTask):
    """Digits out of noise (flow matching): a U-ViT of 0.6M parameters; noise and time belong to the row."""

    NAME, STEPS, BATCH = "flow", 700, 64

    def __init__(self, data: str | Path = "data", **sizes: Any) -> None:
        super().__init__(data, **sizes)
        num = len(self.tensors[0])
        self.data_1 = torch.cat([normal(210, num, 784), torch.from_numpy(uniform(212, num, 1)).float()], 1)

    def plain_model(self) -> nn.Module:
        return Velocity()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, drawn = batch
        images = images.flatten(1) * 2 - 1
        noise, time = drawn[:, :-1], drawn[:, -1:]

        def patches(x: Tensor) -> Tensor:
            return x.reshape(-1, 7, 4, 7, 4).transpose(2, 3).reshape(-1, 49, 16)

        found = model(patches((1 - time) * noise + time * images), time.unsqueeze(-1))
        return F.mse_loss(found, patches(images - noise))


class StateSpace(nn.Module):
    """Sixteen damped waves for each channel, over all that came before: a long convolution (S4D)."""

    def __init__(self, width: int, num_states: int = 16) -> None:
        super().__init__()
        self.step = nn.Parameter(math.log(1e-3) + torch.rand(width, 1, 1) * math.log(100))
        self.decay = nn.Parameter(torch.full((width, num_states, 1), math.log(0.5)))
        self.speed = nn.Parameter(math.pi * torch.arange(num_states).float()[:, None].repeat(width, 1, 1))
        self.real, self.imaginary = (nn.Parameter(torch.randn(width, num_states, 1)) for _ in range(2))
        self.direct = nn.Parameter(torch.randn(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (sequences, channels, places)."""
        length, step = x.shape[-1], self.step.exp()
        time = step * torch.arange(length, device=x.device, dtype=x.dtype)
        angle = self.speed * time
        waves = (-self.decay.exp() * time).exp() * (self.real * angle.cos() - self.imaginary * angle.sin())
        kernel = 2 * step.squeeze(-1) * waves.sum(-2)
        spectrum = torch.fft.rfft(x, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        found: Tensor = torch.fft.irfft(spectrum, 2 * length)[..., :length] + self.direct * x
        return found


class Sequence(nn.Module):
    """A kind for a series of numbers: norms, state spaces, gates, three times."""

    def __init__(self, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(1, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(num_layers)])
        self.states = nn.ModuleList([StateSpace(width) for _ in range(num_layers)])
        self.gates = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unsqueeze(-1))
        for norm, state, gate in zip(self.norms, self.states, self.gates, strict=True):
            found = F.gelu(state(norm(x).transpose(1, 2)).transpose(1, 2))
            x = x + F.glu(gate(found), -1)
        out: Tensor = self.head(x.mean(1))
        return out


class PixelsTask(DigitsTask):
    """Which digit 196 pixels are, one after the other: a state-space model of 0.04M parameters."""

    NAME, STEPS, BATCH = "pixels", 800, 32

    def plain_model(self) -> nn.Module:
        return Sequence()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(F.avg_pool2d(images.unsqueeze(1), 2).flatten(1)), labels)


class Pen(nn.Module):
    """Where a pen goes next: a causal transformer gives a mixture of normal densities, and whether it is lifted."""

    def __init__(self, length: int, width: int = 96, num_kinds: int = 12) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(5, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5 * num_kinds + 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, later(x.shape[1], x.device))
        out: Tensor = self.head(self.norm(x))
        return out


class StrokesTask(PlainTask):
    """How a pen writes Chinese characters: the density of its next move, a mixture, 0.23M parameters; in nats."""

    UNIT, LEAST = 32, 0.05

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 8, download: bool = True
    ) -> None:
        arrays = read_arrays("hanzi", data, download=download)
        order = shuffled(len(arrays["moves"]))
        moves = torch.from_numpy(arrays["moves"][order]).float() / self.UNIT
        lifts = torch.from_numpy(arrays["lifts"][order]).long()
        super().__init__("strokes", [moves, lifts], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Pen(self.tensors[0].shape[1] - 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        moves, lifts = batch
        kinds = lifts.unsqueeze(-1) == torch.arange(3, device=lifts.device)
        seen = torch.cat([moves, kinds.to(moves.dtype)], -1)
        found = model(seen[:, :-1])
        mixture, lifted = found[..., :-3].unflatten(-1, (5, -1)), found[..., -3:]
        shares, centres, widths = mixture[:, :, 0].log_softmax(-1), mixture[:, :, 1:3], mixture[:, :, 3:]
        widths = F.softplus(widths) + self.LEAST
        away = (moves[:, 1:].unsqueeze(-1) - centres) / widths
        logs = shares - (away.square() / 2 + widths.log()).sum(-2) - math.log(2 * math.pi)
        there = (lifts[:, 1:] > 0).to(logs.dtype)
        lost = F.cross_entropy(lifted.transpose(1, 2), lifts[:, 1:], reduction="none") - logs.logsumexp(-1) * there
        loss: Tensor = lost.mean()
        return loss


class Season(nn.Module):
    """Five quantiles for a season: vectors for player and team, and an MLP."""

    def __init__(self, num_players: int, num_teams: int, num_numbers: int) -> None:
        super().__init__()
        self.players, self.teams = nn.Embedding(num_players, 16), nn.Embedding(num_teams, 8)
        self.head = mlp(24 + num_numbers, 128, 128, len(BaseballTask.QUANTILES))

    def forward(self, players: Tensor, teams: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.players(players), self.teams(teams), numbers], -1))
        return out


class BaseballTask(PlainTask):
    """How many runs a player bats in, as quantiles, in runs as they are: embeddings of players and teams, an MLP."""

    QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 2000, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("baseball", data, download=download)
        order = shuffled(len(arrays["runs"]))
        players, teams = (torch.from_numpy(arrays[key][order]).long() for key in ("players", "teams"))
        self.sizes = int(players.max()) + 1, int(teams.max()) + 1
        numbers = arrays["numbers"][order].astype(np.float64)
        numbers = (numbers - numbers.mean(0)) / np.maximum(numbers.std(0), 1e-9)
        tensors = [players, teams, torch.from_numpy(numbers).float(), torch.from_numpy(arrays["runs"][order])]
        super().__init__("baseball", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Season(*self.sizes, self.tensors[2].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        *seen, runs = batch
        below = (runs.unsqueeze(-1) - model(*seen)).unbind(-1)
        lost = [
            torch.maximum(share * part, (share - 1) * part) for share, part in zip(self.QUANTILES, below, strict=True)
        ]
        return torch.stack(lost).mean()


class Field(nn.Module):
    """A function of place and time with its derivatives, which go through the layers beside it."""

    def __init__(self, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers - 1)])
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The function at ``x`` (points, 2), by place, by time, and twice by place."""
        value = self.first(x)
        place, time = (axis.expand_as(value) for axis in self.first.weight.unbind(1))
        bent = torch.zeros_like(value)
        for layer in self.layers:
            value, place, time, bent = self._tanh(value, place, time, bent)
            assert isinstance(layer, nn.Linear)
            value = layer(value)
            place, time, bent = (part @ layer.weight.T for part in (place, time, bent))
        value, place, time, bent = self._tanh(value, place, time, bent)
        weight = self.last.weight.squeeze(0)
        return self.last(value).squeeze(-1), place @ weight, time @ weight, bent @ weight

    @staticmethod
    def _tanh(value: Tensor, place: Tensor, time: Tensor, bent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        value = torch.tanh(value)
        slope = 1 - value.square()
        return value, slope * place, slope * time, slope * (bent - 2 * value * place.square())


class PhysicsTask(PlainTask):
    """Burgers' equation from its terms alone (PINN): what an MLP of 0.01M parameters leaves of it and its borders."""

    VISCOSITY = 0.02

    def __init__(self, *, total_steps: int = 1500, batch_rows: int = 256, num: int = 100_000) -> None:
        drawn = torch.from_numpy(uniform(220, num, 5)).float()
        inside = torch.stack([drawn[:, 0] * 2 - 1, drawn[:, 1]], -1)
        start = torch.stack([drawn[:, 2] * 2 - 1, torch.zeros(num)], -1)
        border = torch.stack([(drawn[:, 3] < 0.5) * 2.0 - 1, drawn[:, 4]], -1)
        tensors = [inside, start, border]
        super().__init__("physics", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num * 9 // 10)

    def plain_model(self) -> nn.Module:
        return Field()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        inside, start, border = batch
        found = model(torch.cat([inside, start, border]))
        value, place, time, bent = (part[: len(inside)] for part in found)
        first, edge = found[0][len(inside) :].chunk(2)
        left = time + value * place - self.VISCOSITY * bent
        wanted = -torch.sin(math.pi * start[:, 0])
        loss: Tensor = left.square().mean() + (first - wanted).square().mean() + edge.square().mean()
        return loss


class Codebook(nn.Module):
    """Photographs as 64 of 256 vectors (VQ-VAE); gives the picture, what was found and what was taken."""

    def __init__(self, width: int = 48, num_codes: int = 256, size: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, size, 1),
        )  # fmt: skip
        self.codes = nn.Embedding(num_codes, size)
        nn.init.normal_(self.codes.weight, std=0.1)
        self.decoder = nn.Sequential(
            nn.Conv2d(size, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.encoder(x).permute(0, 2, 3, 1)
        codes = self.codes.weight
        away = codes.square().sum(-1) - 2 * found @ codes.T
        taken = self.codes(away.argmin(-1))
        passed = found + (taken - found).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), found, taken


class CodebookTask(PhotographsTask):
    """Photographs through a codebook: a VQ-VAE of 0.14M parameters, three losses at once."""

    NAME, STEPS, BATCH = "codebook", 600, 32

    def plain_model(self) -> nn.Module:
        return Codebook()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images = batch[0].permute(0, 3, 1, 2)
        picture, found, taken = model(images)
        kept = F.mse_loss(taken, found.detach()) + 0.25 * F.mse_loss(found, taken.detach())
        return F.mse_loss(picture, images) + kept


class ControlTask(PlainTask):
    """What swinging up a pendulum will cost from where it is, in costs as they are: an MLP of 0.02M parameters.

    The hand pumps energy and then holds; it trembles. Costs of five seconds, later ones count less.
    """

    STEPS, TIME, DISCOUNT = 100, 0.05, 0.98

    def __init__(self, *, total_steps: int = 400, batch_rows: int = 1024, num: int = 100_000) -> None:
        state = (uniform(230, num, 2) * 2 - 1) * np.array([math.pi, 8.0])
        shaken = normal(231, self.STEPS, num).double().numpy()
        (angle, speed), cost = state.T, np.zeros(num)
        for step in range(self.STEPS):
            bent = np.mod(angle + math.pi, 2 * math.pi) - math.pi
            energy = speed**2 / 2 - 10 * (1 - np.cos(bent))
            near = (np.abs(bent) < 0.5) & (np.abs(speed) < 3)
            push = np.clip(np.where(near, -20 * bent - 4 * speed, -np.sign(speed * energy) * 3), -4, 4) + shaken[step]
            cost += self.DISCOUNT**step * (bent**2 + 0.1 * speed**2 + 0.01 * push**2)
            speed = np.clip(speed + self.TIME * (10 * np.sin(bent) + push), -12, 12)
            angle = bent + self.TIME * speed
        seen = np.stack([np.cos(state[:, 0]), np.sin(state[:, 0]), state[:, 1]], 1)
        tensors = [torch.from_numpy(np.round(array, 4)).float() for array in (seen, cost)]
        super().__init__("control", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(3, 128, 128, 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        seen, cost = batch
        return F.huber_loss(model(seen).squeeze(-1), cost)
