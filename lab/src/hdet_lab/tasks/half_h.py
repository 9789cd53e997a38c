"""Tasks of more kinds: German words, names of characters, icons, the globe, films, tomography, sums, drawings, bars.

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
from hdet_lab.tasks.half_e import NUM_BYTES, Layer, later
from hdet_lab.tasks.half_f import TunesTask
from hdet_lab.tasks.packages import GERMAN_LETTERS, NAME_CHARACTERS, NUM_CATEGORIES, read_arrays


class Gated(nn.Module):
    """Whether a word may be divided before each letter: convolutions over letters with gates, each added (GLU)."""

    def __init__(self, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(GERMAN_LETTERS) + 1, width)
        self.layers = nn.ModuleList([nn.Linear(3 * width, 2 * width) for _ in range(num_layers)])
        self.head = nn.Linear(width, 1)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters)
        for layer in self.layers:
            padded = F.pad(x, (0, 0, 1, 1))
            near = torch.cat([padded[:, :-2], x, padded[:, 2:]], -1)
            x = (x + F.glu(layer(near), -1)) * math.sqrt(0.5)
        out: Tensor = self.head(x)
        return out.squeeze(-1)


class HyphensTask(PlainTask):
    """Where German words may be divided, as TeX does: convolutions with gates and no norm, 0.1M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 800, batch_rows: int = 32, download: bool = True
    ) -> None:
        arrays = read_arrays("hyphens", data, download=download)  # in no order
        tensors = [torch.from_numpy(arrays[key]).long() for key in ("letters", "breaks")]
        super().__init__("hyphens", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Gated()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, breaks = batch
        found = model(letters)
        asked = (letters > 0).to(found.dtype)
        lost = F.binary_cross_entropy_with_logits(found, breaks.to(found.dtype), reduction="none")
        loss: Tensor = (lost * asked).sum() / asked.sum()
        return loss


class Triples(nn.Module):
    """A kind for a name: the mean of a vector for each three characters in a row, and a head (fastText)."""

    NUM = len(NAME_CHARACTERS) + 1

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.triples, self.head = nn.Embedding(self.NUM**3, width), nn.Linear(width, NUM_CATEGORIES)

    def forward(self, letters: Tensor) -> Tensor:
        which = (letters[:, :-2] * self.NUM + letters[:, 1:-1]) * self.NUM + letters[:, 2:]
        found = self.triples(which)
        share = (letters[:, 2:] > 0).to(found.dtype).unsqueeze(-1)
        out: Tensor = self.head((found * share).sum(1) / share.sum(1).clamp(min=1.0))
        return out


class UnicodeTask(PlainTask):
    """The category of a character of Unicode from its name: vectors for triples of letters, 3.8M parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 600, batch_rows: int = 128, download: bool = True
    ) -> None:
        arrays = read_arrays("unicode", data, download=download)
        order = shuffled(len(arrays["letters"]))
        tensors = [torch.from_numpy(arrays[key][order]).long() for key in ("letters", "categories")]
        super().__init__("unicode", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Triples()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        letters, categories = batch
        return F.cross_entropy(model(letters), categories)


class Window(nn.Module):
    """Bytes that come next, by the last sixteen side by side: a hidden layer of tanh (Bengio's language model)."""

    SEEN = 16

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_BYTES, width)
        self.layers = mlp(self.SEEN * width, *[16 * width] * num_layers, NUM_BYTES, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(self.symbols(x), (0, 0, self.SEEN - 1, 0))
        near = [padded[:, place : place + x.shape[1]] for place in range(self.SEEN)]
        out: Tensor = self.layers(torch.cat(near, -1))
        return out


class IconsTask(TunesTask):
    """The next byte of the outlines of icons: an MLP of 1.2M parameters on the sixteen before."""

    def plain_model(self) -> nn.Module:
        return Window(self.sizes["width"], self.sizes["num_layers"])


def icons(data: str | Path = "data", *, download: bool = True, **sizes: int) -> IconsTask:
    """:class:`IconsTask` on the Material Design icons."""
    text = torch.from_numpy(read_arrays("icons", data, download=download)["text"])
    small = {"context": 48, "num_layers": 1, "width": 64, "batch_rows": 16, "total_steps": 700}
    return IconsTask("icons", text, NUM_BYTES, **{**small, **sizes})


class Bumps(nn.Module):
    """A function on a sphere: the sum of bumps at places that are spread evenly, which do not move."""

    def __init__(self, num: int = 1024, sharpness: float = 150.0) -> None:
        super().__init__()
        self.num, self.sharpness = num, sharpness
        self.heights = nn.Linear(num, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (places, 3), of length 1."""
        order = torch.arange(self.num, device=x.device, dtype=x.dtype)
        up, angle = (2 * order + 1) / self.num - 1, order * (math.pi * (3 - math.sqrt(5)))
        across = (1 - up.square()).sqrt()
        centres = torch.stack([across * angle.cos(), across * angle.sin(), up])  # Fibonacci's spiral
        out: Tensor = self.heights((self.sharpness * (x @ centres - 1)).exp())
        return out.squeeze(-1)


class CoastsTask(PlainTask):
    """Whether there is land at a place of the globe: logistic regression on 1,024 bumps, all that is learned."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 400, batch_rows: int = 1024, download: bool = True
    ) -> None:
        arrays = read_arrays("coasts", data, download=download)  # in no order
        latitude, longitude = np.radians(arrays["places"].astype(np.float64)).T
        across = np.cos(latitude)
        places = np.stack([across * np.cos(longitude), across * np.sin(longitude), np.sin(latitude)], 1)
        tensors = [torch.from_numpy(places).float(), torch.from_numpy(arrays["land"]).float()]
        super().__init__("coasts", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Bumps()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        places, land = batch
        return F.binary_cross_entropy_with_logits(model(places), land)


class FilmsTask(PlainTask):
    """How a film is rated from its year, its length, how many rated it, all as they are: an MLP, 5,000 parameters."""

    def __init__(
        self, data: str | Path = "data", *, total_steps: int = 2500, batch_rows: int = 8, download: bool = True
    ) -> None:
        arrays = read_arrays("films", data, download=download)
        order = shuffled(len(arrays["ratings"]))
        tensors = [torch.from_numpy(arrays[key][order]) for key in ("numbers", "ratings")]
        super().__init__("films", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(self.tensors[0].shape[1], 64, 64, 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        numbers, ratings = batch
        return F.smooth_l1_loss(model(numbers).squeeze(-1), ratings)


def chords(ellipses: NDArray[Any], angles: NDArray[Any], offsets: NDArray[Any]) -> NDArray[Any]:
    """How much of each line lies in ellipses, times what they weigh: (pictures, angles, offsets).

    ``ellipses``: (pictures, ellipses, 6), each a place, two half-axes, how it is turned, and a weight.
    """
    x, y, wide, high, turned, weight = (part[..., None, None] for part in np.moveaxis(ellipses, -1, 0))
    square = (wide * np.cos(angles[:, None] - turned)) ** 2 + (high * np.sin(angles[:, None] - turned)) ** 2
    past = offsets - x * np.cos(angles[:, None]) - y * np.sin(angles[:, None])
    length = 2 * wide * high * np.sqrt(np.maximum(square - past**2, 0)) / square
    total: NDArray[Any] = (weight * length).sum(1)
    return total


class TomographyTask(PlainTask):
    """What is inside of a disc, 24x24, from how much 24 noisy rays in 24 directions lose: an MLP of 2.2M parameters."""

    SIDE = 24

    def __init__(self, *, total_steps: int = 500, batch_rows: int = 64, num: int = 12_000) -> None:
        side = self.SIDE
        drawn = uniform(310, num, 3, 6)
        centre = (drawn[..., :2] - 0.5) * 0.9
        ellipses = np.concatenate(
            [centre, 0.15 + 0.35 * drawn[..., 2:4], drawn[..., 4:5] * np.pi, 0.3 + 0.7 * drawn[..., 5:]], -1
        )
        places = (np.arange(side) + 0.5) / side * 2 - 1
        rays = chords(ellipses, np.arange(side) / side * np.pi, places).reshape(num, -1)
        pictures = np.zeros((num, side, side))
        for x, y, wide, high, turned, weight in (part.T[..., None, None] for part in np.moveaxis(ellipses, 1, 0)):
            right, up = places - x, places[:, None] - y
            along, aside = right * np.cos(turned) + up * np.sin(turned), up * np.cos(turned) - right * np.sin(turned)
            pictures += weight * ((along / wide) ** 2 + (aside / high) ** 2 < 1)
        noisy = torch.from_numpy(np.round(rays, 4)).float() + 0.02 * normal(311, *rays.shape)
        tensors = [noisy, torch.from_numpy(np.round(pictures, 4)).float().flatten(1)]
        super().__init__("tomography", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return mlp(self.SIDE**2, 1024, 1024, self.SIDE**2)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        rays, pictures = batch
        return F.mse_loss(model(rays), pictures)


class Elman(nn.Module):
    """A digit for each column of a sum, the lowest first: a recurrent layer of tanh without gates."""

    def __init__(self, num_digits: int = 10, width: int = 64) -> None:
        super().__init__()
        self.digits, self.back = nn.Embedding(num_digits, width), nn.Linear(width, width)
        self.head = nn.Linear(width, num_digits)

    def forward(self, digits: Tensor) -> Tensor:
        """``digits``: (sums, columns, numbers)."""
        seen = self.digits(digits).sum(-2)
        state, states = seen[:, 0] * 0, []
        for here in seen.unbind(1):
            state = torch.tanh(here + self.back(state))
            states.append(state)
        out: Tensor = self.head(torch.stack(states, 1))
        return out


class CarriesTask(PlainTask):
    """The sum of two numbers of 12 digits, column by column, one digit in twenty any: 5,500 recurrent weights."""

    DIGITS = 12

    def __init__(self, *, total_steps: int = 1500, batch_rows: int = 16, num: int = 30_000) -> None:
        digits = (uniform(320, num, self.DIGITS, 2) * 10).astype(np.int64)
        total, carry = np.zeros((num, self.DIGITS), dtype=np.int64), np.zeros(num, dtype=np.int64)
        for place in range(self.DIGITS):
            carry, total[:, place] = np.divmod(digits[:, place].sum(-1) + carry, 10)
        wrong = (uniform(321, num, self.DIGITS) * 10).astype(np.int64)
        total = np.where(uniform(322, num, self.DIGITS) < 0.05, wrong, total)
        tensors = [torch.from_numpy(digits), torch.from_numpy(total)]
        super().__init__("carries", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Elman()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        digits, total = batch
        return F.cross_entropy(model(digits).transpose(1, 2), total)


class Drawer(nn.Module):
    """A picture from a few numbers: twice the side three times, each with BatchNorm, drawn small (DCGAN)."""

    def __init__(self, num_numbers: int, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(num_numbers, width * 16)
        widths = (width, width // 2, width // 4)
        self.norms = nn.ModuleList([nn.BatchNorm2d(num) for num in widths])
        self.layers = nn.ModuleList([nn.ConvTranspose2d(num, num // 2, 4, stride=2, padding=1) for num in widths])
        self.head = nn.Conv2d(width // 8, 1, 3, padding=1)
        for layer in self.layers:
            assert isinstance(layer, nn.ConvTranspose2d)
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(len(x), -1, 4, 4)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(F.relu(norm(x)))
        out: Tensor = self.head(F.relu(x))
        return out.squeeze(1)


class DrawingTask(PlainTask):
    """Two triangles, squares or pentagons, 32x32, from numbers that say which and where: 0.2M parameters."""

    SIDE = 32

    def __init__(self, *, total_steps: int = 600, batch_rows: int = 32, num: int = 12_000) -> None:
        drawn = uniform(330, num, 2, 4)
        place = (np.arange(self.SIDE) + 0.5) / self.SIDE * 2 - 1
        pictures, numbers = np.zeros((num, self.SIDE, self.SIDE)), []
        for x, y, turned, kind in (part.T for part in np.moveaxis(drawn, 1, 0)):
            corners = 3 + np.floor(kind * 3)
            across, up = (x - 0.5) * 1.2, (y - 0.5) * 1.2
            right, above = place - across[:, None, None], place[:, None] - up[:, None, None]
            side, angle = (
                2 * np.pi / corners[:, None, None],
                np.arctan2(above, right) - 2 * np.pi * turned[:, None, None],
            )
            reach = 0.4 * np.cos(side / 2) / np.cos(np.mod(angle, side) - side / 2)
            pictures = np.maximum(pictures, 1 / (1 + np.exp(30 * (np.hypot(right, above) - reach))))
            numbers += [across, up, np.cos(2 * np.pi * turned), np.sin(2 * np.pi * turned)]
            numbers += [(corners == num_corners) * 1.0 for num_corners in (3, 4, 5)]
        tensors = [torch.from_numpy(np.round(array, 4)).float() for array in (np.stack(numbers, 1), pictures)]
        super().__init__("drawing", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Drawer(self.tensors[0].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        numbers, pictures = batch
        return F.binary_cross_entropy_with_logits(model(numbers), pictures)


class Learner(nn.Module):
    """What follows from the examples so far: a causal transformer, whose places have an input and the last answer."""

    def __init__(self, num_inputs: int, num_places: int, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(2 * num_inputs + 1, width), nn.Embedding(num_places, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, inputs: Tensor, answers: Tensor) -> Tensor:
        before = F.pad(torch.cat([inputs, answers.unsqueeze(-1)], -1)[:, :-1], (0, 0, 1, 0))
        x = self.first(torch.cat([inputs, before], -1)) + self.places.weight
        for layer in self.layers:
            x = layer(x, later(x.shape[1], x.device))
        out: Tensor = self.head(self.norm(x))
        return out.squeeze(-1)


class ContextTask(PlainTask):
    """Lines through noise, each another, that are to be found from examples before: a transformer, 0.15M parameters."""

    INPUTS, PLACES, NOISE = 4, 16, 0.1

    def __init__(self, *, total_steps: int = 1200, batch_rows: int = 64, num: int = 40_000) -> None:
        inputs, slopes = normal(340, num, self.PLACES, self.INPUTS), normal(342, num, self.INPUTS, 1)
        answers = (inputs @ slopes).squeeze(-1) / math.sqrt(self.INPUTS)
        answers = answers + self.NOISE * normal(344, num, self.PLACES)
        super().__init__("context", [inputs, answers], total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return Learner(self.INPUTS, self.PLACES)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        inputs, answers = batch
        return F.mse_loss(model(inputs, answers), answers)


class DeepOperator(nn.Module):
    """A function at some places from two others: what a network makes of them, times what one makes of the place.

    Its authors call it DeepONet.
    """

    def __init__(self, num_points: int, width: int = 128, num_parts: int = 64) -> None:
        super().__init__()
        self.branch = mlp(num_points, width, width, num_parts, act=nn.GELU)
        self.trunk = mlp(1, width, width, num_parts, act=nn.Tanh)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, functions: Tensor, places: Tensor) -> Tensor:
        """``functions``: (rows, points); ``places``: (rows, places)."""
        parts = self.trunk(places.unsqueeze(-1)) @ self.branch(functions).unsqueeze(-1)
        out: Tensor = parts.squeeze(-1) + self.bias
        return out


def warmth(conduct: NDArray[Any], heat: NDArray[Any]) -> NDArray[Any]:
    """How warm a bar with cold ends is at the ends of its cells: -(a u')' = f, where ``a`` and ``f`` are of cells."""
    step = 1 / conduct.shape[1]
    flow = -(np.cumsum(heat, axis=1) - heat / 2) * step  # but for what leaves the first end
    first = -(flow / conduct).sum(1) / (1 / conduct).sum(1)
    inside = np.cumsum((flow + first[:, None]) / conduct, axis=1) * step
    return np.pad(inside, ((0, 0), (1, 0)))


class BarsTask(PlainTask):
    """How warm a bar is at sixteen places, from how it conducts and is heated: a DeepONet of 0.06M parameters."""

    CELLS, PLACES = 128, 16

    def __init__(self, *, total_steps: int = 1000, batch_rows: int = 128, num: int = 20_000) -> None:
        middle = (np.arange(self.CELLS) + 0.5) / self.CELLS
        angles = 2 * np.pi * np.arange(1, 4)[:, None] * middle
        drawn = uniform(350, num, 2, 2, 3) * 2 - 1
        drawn /= np.arange(1, 4)
        bent, heat = (drawn[:, which, 0] @ np.sin(angles) + drawn[:, which, 1] @ np.cos(angles) for which in (0, 1))
        conduct, heat = np.exp(bent), 10 * (1 + heat)
        which = (uniform(351, num, self.PLACES) * (self.CELLS + 1)).astype(np.int64)
        warm = np.take_along_axis(warmth(conduct, heat), which, axis=1)
        seen = np.concatenate([bent[:, ::4], heat[:, ::4] / 10], 1)
        tensors = [torch.from_numpy(np.round(array, 4)).float() for array in (seen, which / self.CELLS, warm)]
        super().__init__("bars", tensors, total_steps=total_steps, batch_rows=batch_rows)

    def plain_model(self) -> nn.Module:
        return DeepOperator(self.tensors[0].shape[1])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        functions, places, warm = batch
        return F.mse_loss(model(functions, places), warm)
