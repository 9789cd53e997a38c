"""What an anchor of a share of the entries does to the gradient signal, and to a run. About half an hour on two cores.

python lab/benchmarks/anchor_share.py noise      # error of the estimates against the batch noise of one sample
python lab/benchmarks/anchor_share.py runs       # final losses of AutoLR by share
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR, Copies
from hdet.weights.anchor import columns_of

LENGTH = 64
ROOT = Path(__file__).parents[2]
TEXT = "".join(f.read_text() for f in [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("src/hdet/*/*.py"))])
CHARACTERS = sorted(set(TEXT))
DATA = torch.tensor([CHARACTERS.index(c) for c in TEXT])


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        num, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(num, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(num, length, width))
        out: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Of characters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def loss(self, x: Tensor) -> Tensor:
        found = self.head(self.norm(self.blocks(self.tokens(x[:, :-1]) + self.places.weight)))
        return cross_entropy(found.flatten(0, 1), x[:, 1:].flatten())


def batch(g: torch.Generator, size: int) -> Tensor:
    starts = torch.randint(len(DATA) - LENGTH - 1, (size,), generator=g)
    return torch.stack([DATA[i : i + LENGTH + 1] for i in starts.tolist()])


def estimate(products: list[Tensor], stride: int) -> float:
    total = 0.0
    for p in products:
        columns = columns_of(p, stride)
        total += p.sum().item() if columns is None else columns.of(p).sum().item() * columns.weight
    return total


def noise(width: int, layers: int, size: int, at: tuple[int, ...], num_batches: int, seed: int) -> None:
    """Adam with a fixed learning rate; at some steps the sample of many batches, from all entries and from a share."""
    torch.manual_seed(seed)
    model, g = GPT(width, layers), torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    anchors = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(1, max(at) + 1):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(batch(g, size)))
        optimizer.step()
        if step not in at:
            continue
        found: dict[int, list[float]] = {1: [], 16: [], 256: []}
        for _ in range(num_batches):
            optimizer.zero_grad()
            torch.autograd.backward(model.loss(batch(g, size)))
            moved = zip(parameters, anchors, strict=True)
            products = [p.grad * (p.detach() - a) for p, a in moved if p.grad is not None]
            for stride, samples in found.items():
                samples.append(estimate(products, stride))
        whole = torch.tensor(found[1])
        deviation = whole.std().item()
        told = [f"{width} wide, seed {seed}, step {step}: mean {whole.mean().item():+.3f}, sd {deviation:.3f}"]
        for stride in (16, 256):
            error = (torch.tensor(found[stride]) - whole) / deviation
            told.append(f"1/{stride}: {error.mean().item():+.2f} +- {error.std().item():.2f}")
        print("; ".join(told), flush=True)


def run(share: float, seed: int, num_steps: int = 250) -> None:
    """AutoLR over one-cycle from 1e-3 in rounds of five; the loss on 8 batches in the end."""
    torch.manual_seed(seed)
    model, g = GPT(128, 2), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = OneCycleLR(optimizer, 1e-3, num_steps, pct_start=0.1, cycle_momentum=False)
    auto = AutoLR(schedule, model=model, interval=5, copies=Copies(anchor_share=share))
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model.loss(batch(g, 8))
        torch.autograd.backward(loss)
        optimizer.step()
        auto.step(loss)
    with torch.no_grad():
        g = torch.Generator().manual_seed(99)
        final = sum(model.loss(batch(g, 32)).item() for _ in range(8)) / 8
    print(f"seed {seed}, share 1/{round(1 / share)}: loss {final:.4f}, last scale {auto.history[-1].scales[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("noise", "runs"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.what == "noise":
        for seed in range(3):
            noise(128, 2, 16, (5, 40, 150, 400), 24, seed)
        for seed in range(2):
            noise(512, 3, 8, (5, 30, 100), 12, seed)
    else:
        for seed in range(3):
            for share in (1, 1 / 16, 1 / 256):
                run(share, seed)


if __name__ == "__main__":
    main()
