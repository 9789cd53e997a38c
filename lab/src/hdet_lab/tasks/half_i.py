"""Tasks of other kinds again: quotations, colours, glyphs, doctors, typing, melting, voices, charges, clusters.

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
from hdet_lab.tasks.half_d import PlainTask, integers, mlp, normal, uniform
from hdet_lab.tasks.half_e import NUM_LETTERS, Attention, Layer, later
from hdet_lab.tasks.half_f import TunesTask
from hdet_lab.tasks.half_g import standardised
from hdet_lab.tasks.packages import COLOUR_CHARACTERS, NUM_FORMULA_CHARACTERS, NUM_VOICES, read_arrays


class Looped(nn.Module):
    """Bytes that come next, by one layer of a transformer that is gone through again and again."""

    def __init__(self, context: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layer, self.norm, self.head = Layer(width), nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        seen = self.tokens(x) + self.positions.weight[:length]
        for _ in range(self.num_layers):
            seen = self.layer(seen, later(length, x.device))
        out: Tensor = self.head(self.norm(seen))
        return out


class QuotesTask(TunesTask):
    """The next byte of German quotations: a GPT whose one layer is used three times, 0.27M parameters."""

    def plain_model(self) -> nn.Module:
        return Looped(self.context, self.sizes["width"], self.sizes["num_layers"])


def quotes(data: str | Path = "data", *, download: bool = True, **sizes: int) -> QuotesTask:
    """:class:`QuotesTask` on what Debian's ``fortune`` says in German."""
    text = torch.from_numpy(read_arrays("quotes", data, download=download)["text"])
    small = {"context": 64, "num_layers": 3, "width": 128, "batch_rows": 8, "total_steps": 800}
    return QuotesTask("quotes", text, 256, **{**small, **sizes})


class SpatialGate(nn.Module):
    """A hidden layer, half of which is mixed across places and multiplies the other half (gMLP)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first, self.last = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.places = nn.Linear(length, length)
        nn.init.normal_(self.places.weight, std=1e-3)
        nn.init.ones_(self.places.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept, mixed = F.gelu(self.first(self.before(x))).chunk(2, -1)
        mixed = self.places(self.norm(mixed).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.last(kept * mixed)
        return out


class Painter(nn.Module):
    """A colour for a name: letters, gates across places, the mean."""

    def __init__(self, length: int, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.inputs = nn.Embedding(len(COLOUR_CHARACTERS) + 2, width)
        self.layers = nn.Sequential(*(SpatialGate(length, width) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.inputs(x))).mean(1))
        return out


class ColoursTask(PlainTask):
    """How red, green and blue a colour is by what people call it, from 0 to 1: a gMLP of 0.04M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 1000, batch_rows: int = 64, download: bool = True
    ) -> None:
        arrays = read_arrays("colours", data, download=download)
        order = shuffled(len(arrays["letters"]))
        letters, colours = (torch.from_numpy(arrays[key][order]) for key in ("letters", "colours"))
        super().__init__("colours", [letters.long(), colours / 255], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Painter(self.tensors[0].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, colours = batch
        return F.mse_loss(model(letters), colours)


class Unseen(nn.Module):
    """A convolution that sees what is above and to the left (PixelCNN); with ``here``, the point itself too."""

    def __init__(self, before: int, after: int, size: int, *, here: bool) -> None:
        super().__init__()
        self.size, self.num_seen = size, size * size // 2 + here
        self.layer = nn.Conv2d(before, after, size)
        nn.init.normal_(self.layer.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(self.size**2, device=x.device).view(self.size, self.size) < self.num_seen
        return F.conv2d(x, self.layer.weight * seen, self.layer.bias, padding=self.size // 2)


class Printer(nn.Module):
    """Whether each point of a picture is black, from those before: convolutions without a norm, each added."""

    def __init__(self, width: int = 24, num_layers: int = 5) -> None:
        super().__init__()
        self.first = Unseen(1, width, 7, here=False)
        self.layers = nn.ModuleList([Unseen(width, width, 3, here=True) for _ in range(num_layers)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (pictures, 1, rows, columns)."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(F.relu(x))
        out: Tensor = self.head(F.relu(x))
        return out


class GlyphsTask(PlainTask):
    """The next point of a character of Unicode as it is drawn, 16x16: a PixelCNN of 0.03M weights, drawn small."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 16, download: bool = True
    ) -> None:
        points = np.unpackbits(read_arrays("glyphs", data, download=download)["points"], axis=1)  # in no order
        tensors = [torch.from_numpy(points).view(-1, 1, 16, 16)]
        num = len(points)
        num_train = num - min(2000, num // 5)
        super().__init__("glyphs", tensors, total_steps=total_steps, batch_rows=batch_rows, num_train=num_train)

    def plain_model(self) -> nn.Module:
        return Printer()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        points = batch[0].float()
        return F.binary_cross_entropy_with_logits(model(points), points)


class VisitsTask(PlainTask):
    """How often people see a doctor: a Poisson regression on what is known of them and its products, 136 weights.

    The loss is the deviance, which is convex.
    """

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 400, batch_rows: int = 1024, download: bool = True
    ) -> None:
        arrays = read_arrays("visits", data, download=download)
        order = shuffled(len(arrays["visits"]))
        numbers = standardised(arrays["numbers"][order]).clamp(-3, 3)
        first, second = torch.triu_indices(*[numbers.shape[1]] * 2)
        products = standardised((numbers[:, first] * numbers[:, second]).numpy()).clamp(-3, 3)
        tensors = [torch.cat([numbers, products], 1), torch.from_numpy(arrays["visits"][order])]
        super().__init__("visits", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return nn.Linear(self.tensors[0].shape[1], 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        numbers, visits = batch
        logs = model(numbers).squeeze(-1)
        loss: Tensor = 2 * (torch.xlogy(visits, visits) - visits * (logs + 1) + logs.exp()).mean()
        return loss


def mistyped(letters: NDArray[Any], seed: int) -> NDArray[Any]:
    """Words as somebody might type them: a letter is wrong, missing, too much, or in the place of the next."""
    letters = np.pad(letters.astype(np.int64), ((0, 0), (0, 2)))
    num, length = letters.shape
    kind, where, other = (uniform(seed + part, num, 1) for part in range(3))
    kind, size = np.floor(kind * 4), (letters > 0).sum(1, keepdims=True)
    place = np.floor(where * np.where(kind == 3, size - 1, size)).astype(np.int64)
    index = np.arange(length)
    source = np.where(kind == 1, index + (index >= place), index) - ((kind == 2) & (index > place))
    source = source + ((kind == 3) & (index == place)) - ((kind == 3) & (index == place + 1))
    found = np.take_along_axis(letters, np.minimum(source, length - 1), axis=1)
    drawn = 1 + np.floor(other * (NUM_LETTERS - 1)).astype(np.int64)
    typed: NDArray[Any] = np.where((kind % 2 == 0) & (index == place), drawn, found)
    return typed[:, :-1]


class Highway(nn.Module):
    """Letters of a word from those that were typed: hidden layers that first let most through (highway network)."""

    def __init__(self, num_typed: int, num_letters: int, width: int = 256, num_layers: int = 6) -> None:
        super().__init__()
        self.inputs, self.first = nn.Embedding(NUM_LETTERS, 16), nn.Linear(16 * num_typed, width)
        self.layers = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(num_layers)])
        self.head = nn.Linear(width, num_letters * NUM_LETTERS)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.constant_(layer.bias[width:], -2)

    def forward(self, typed: Tensor) -> Tensor:
        x = self.first(self.inputs(typed).flatten(1))
        for layer in self.layers:
            new, gate = layer(x).chunk(2, -1)
            share = torch.sigmoid(gate)
            x = share * torch.relu(new) + (1 - share) * x
        out: Tensor = self.head(x)
        return out.view(len(x), -1, NUM_LETTERS)


class SpellingsTask(PlainTask):
    """Which word was meant, letter by letter, after two slips in typing it: a highway network of 1M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 256, download: bool = True
    ) -> None:
        letters = read_arrays("spellings", data, download=download)["letters"]  # in no order
        typed = mistyped(mistyped(letters, 360), 363)
        tensors = [torch.from_numpy(typed), torch.from_numpy(letters).long()]
        super().__init__("spellings", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Highway(*(tensor.shape[1] for tensor in self.tensors))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        typed, letters = batch
        found = model(typed)
        asked = (letters > 0).to(found.dtype)
        return (F.cross_entropy(found.transpose(1, 2), letters, reduction="none") * asked).sum() / asked.sum()


class Substance(nn.Module):
    """A number for a formula: the sum of a vector for each two characters in a row, drawn large, and an MLP."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inputs = nn.Embedding(NUM_FORMULA_CHARACTERS**2, width)
        self.layers, self.head = mlp(width, 128, 128), nn.Linear(128, 1)

    def forward(self, letters: Tensor) -> Tensor:
        first, second = letters[:, :-1], letters[:, 1:]
        there = (first > 0).unsqueeze(-1)
        found = (self.inputs(first * NUM_FORMULA_CHARACTERS + second) * there).sum(1)
        out: Tensor = self.head(torch.relu(self.layers(found)))
        return out.squeeze(-1)


class MeltingTask(PlainTask):
    """Where a substance melts, in kelvin as they are, by squared error: pairs of characters, 0.13M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 2000, batch_rows: int = 16, download: bool = True
    ) -> None:
        arrays = read_arrays("melting", data, download=download)
        order = shuffled(len(arrays["kelvin"]))
        tensors = [torch.from_numpy(arrays["letters"][order]).long(), torch.from_numpy(arrays["kelvin"][order])]
        super().__init__("melting", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Substance()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, kelvin = batch
        return F.mse_loss(model(letters), kelvin)


class Listener(nn.Module):
    """A voice for a picture of sound: strided convolutions with BatchNorm, the mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 24, 1), (24, 48, 2), (48, 64, 2)):
            layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(64, NUM_VOICES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x.unsqueeze(1)).mean((2, 3)))
        return out


class VoicesTask(PlainTask):
    """Which of five people speaks, each another language, by a quarter of a second under noise: 0.04M parameters."""

    NOISE = 4.0
    """In steps of 3 dB."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 500, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("voices", data, download=download)
        order = shuffled(len(arrays["voices"]))
        clips = torch.from_numpy(arrays["clips"][order]).float()
        clips = (clips + self.NOISE * normal(370, *clips.shape) - 18) / 8
        tensors = [clips, torch.from_numpy(arrays["voices"][order]).long()]
        super().__init__("voices", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Listener()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        clips, voices = batch
        return F.cross_entropy(model(clips), voices)


class Equalised(nn.Module):
    """A linear layer whose weights are drawn from N(0, 1), and made small only where it is used."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(after, before)), nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / math.sqrt(self.weight.shape[1]), self.bias)


class Interactions(nn.Module):
    """How bodies are pulled: a network for each two of them, the sum, and a network for each (interaction network)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.pairs = nn.Sequential(Equalised(4, width), nn.SiLU(), Equalised(width, width))
        self.each = nn.Sequential(Equalised(width, width), nn.SiLU(), Equalised(width, 2))

    def forward(self, places: Tensor, charges: Tensor) -> Tensor:
        """``places``: (rows, bodies, 2); ``charges``: (rows, bodies)."""
        num = places.shape[1]
        apart = places.unsqueeze(2) - places.unsqueeze(1)
        own, other = (charges.unsqueeze(axis).expand(-1, num, num) for axis in (2, 1))
        seen = self.pairs(torch.cat([apart, own.unsqueeze(-1), other.unsqueeze(-1)], -1))
        out: Tensor = self.each(seen.sum(2))
        return out


class ChargesTask(PlainTask):
    """How six charges push and pull each other, measured with noise: a graph network of 5,000 weights, drawn large."""

    BODIES, SOFT, NOISE = 6, 0.3, 0.3

    def __init__(self, *, total_steps: int = 3000, batch_rows: int = 8, num: int = 30_000) -> None:
        places = np.round(uniform(380, num, self.BODIES, 2) * 4 - 2, 4)
        charges = np.round(uniform(381, num, self.BODIES) * 4 - 2, 4)
        apart = places[:, :, None] - places[:, None]
        strength = charges[:, :, None] * charges[:, None] / ((apart**2).sum(-1) + self.SOFT) ** 1.5
        force = torch.from_numpy(np.round((apart * strength[..., None]).sum(2), 4)).float()
        force = force + self.NOISE * normal(382, num, self.BODIES, 2)
        tensors = [torch.from_numpy(places).float(), torch.from_numpy(charges).float(), force]
        super().__init__("charges", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Interactions()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        places, charges, force = batch
        return F.mse_loss(model(places, charges), force)


class Look(nn.Module):
    """What some vectors take from others, and a hidden layer, both added and without a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width), mlp(width, 2 * width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = x + self.attention(x, other)
        out: Tensor = x + F.relu(self.feed(x))
        return out


class Clusterer(nn.Module):
    """Normal densities for a set of points: the points look at each other, then seeds at them (Set Transformer)."""

    def __init__(self, num_parts: int, width: int = 128) -> None:
        super().__init__()
        self.first, self.seeds = nn.Linear(2, width), nn.Parameter(torch.randn(num_parts, width))
        self.points, self.pool, self.parts = Look(width), Look(width), Look(width)
        self.head = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        """For each part its weight, its place and its size, of ``points`` (sets, points, 2)."""
        seen = self.first(points)
        seen = self.points(seen, seen)
        parts = self.pool(self.seeds.expand(len(points), -1, -1), seen)
        out: Tensor = self.head(self.parts(parts, parts))
        return out


class ClustersTask(PlainTask):
    """Four round clusters among 40 points, found at one look: a Set Transformer of 0.4M weights; nats a point."""

    PARTS, POINTS = 4, 40

    def __init__(self, *, total_steps: int = 1000, batch_rows: int = 24, num: int = 30_000) -> None:
        centres = torch.from_numpy(uniform(390, num, self.PARTS, 2)).float() * 8 - 4
        sizes = 0.2 + 0.6 * torch.from_numpy(uniform(391, num, self.PARTS, 1)).float()
        which = integers(392, self.PARTS, num, self.POINTS).unsqueeze(-1)
        centre, size = centres.gather(1, which.expand(-1, -1, 2)), sizes.gather(1, which)
        points = centre + size * normal(393, num, self.POINTS, 2)
        super().__init__("clusters", [points], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Clusterer(self.PARTS)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        (points,) = batch
        found = model(points).unsqueeze(1)  # (sets, 1, parts, 4)
        sizes = found[..., 3]
        square = (points.unsqueeze(2) - found[..., 1:3]).square().sum(-1)
        logs = found[..., 0].log_softmax(-1) - square * (-2 * sizes).exp() / 2 - 2 * sizes - math.log(2 * math.pi)
        loss: Tensor = -logs.logsumexp(-1).mean()
        return loss
