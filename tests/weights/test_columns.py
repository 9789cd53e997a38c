"""A share of a parameter's entries: which they are, that parts of a tensor have their parts, and what it saves."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from hdet.replicas.sharding import LARGE_MODEL, Sharding, num_parameters
from hdet.weights.anchor import SMALL_TENSOR, Anchor, Columns, _first_row, columns_of, stride_of
from hdet.weights.snapshot import PinnedMemory, host_if_large


def slowly(tensor: Tensor, columns: Columns) -> list[complex]:
    """Entry by entry, of a whole tensor."""
    matrix = tensor.reshape(columns.num_rows, columns.width)
    return [
        matrix[i, i % columns.stride + j * columns.stride].item()
        for i in range(columns.num_rows)
        for j in range(columns.width // columns.stride)
    ]


TENSORS: dict[str, Tensor] = {
    "matrix": torch.arange(70.0 * 96).view(70, 96),
    "few rows": torch.arange(3.0 * 2000).view(3, 2000),
    "vector": torch.arange(5000.0),
    "transposed": torch.arange(70.0 * 96).view(96, 70).t(),
    "channels last": torch.arange(32.0 * 8 * 5 * 5).view(32, 8, 5, 5).to(memory_format=torch.channels_last),
    "expanded rows": torch.arange(100.0).expand(60, 100),
    "expanded columns": torch.arange(60.0).view(60, 1).expand(60, 100),
    "complex": torch.complex(torch.arange(6400.0), -torch.arange(6400.0)).view(64, 100),
    "in a buffer": torch.arange(7000.0)[17:6017].view(60, 100),
}


@pytest.mark.parametrize("stride", [2, 3, 16, 256])
@pytest.mark.parametrize("name", TENSORS)
def test_the_entries_are_those_of_the_slow_version(name: str, stride: int) -> None:
    tensor = TENSORS[name]
    columns = columns_of(tensor, stride)
    assert columns is not None
    assert 3 * stride // 4 < columns.stride <= stride or columns.stride <= columns.width // 2
    found = columns.of(tensor)
    assert found.shape == columns.shape
    assert found.flatten().tolist() == slowly(tensor, columns)
    assert columns.weight * found.numel() == tensor.numel()


@given(
    num_rows=st.integers(1, 90), width=st.integers(4, 50), stride=st.integers(2, 30), cuts=st.sets(st.integers(0, 90))
)
def test_parts_of_the_rows_have_their_parts(num_rows: int, width: int, stride: int, cuts: set[int]) -> None:
    """However unequal shards are, and some may be empty."""
    tensor = torch.arange(float(num_rows * width)).view(num_rows, width)
    whole = Columns(num_rows, width, min(stride, width // 2))
    bounds = [0, *sorted(min(cut, num_rows) for cut in cuts), num_rows]
    shards = itertools.pairwise(bounds)
    parts = [whole._replace(row=first).of(tensor[first:last]) for first, last in shards]
    assert torch.equal(torch.cat(parts), whole.of(tensor))
    rows = torch.randperm(num_rows)
    assert torch.equal(whole.of_rows(tensor[rows], rows), whole.of(tensor)[rows])
    first = num_rows // 2  # rows of a shard are counted from its own first
    there = whole._replace(row=first)
    assert torch.equal(there.of_rows(tensor[first:], torch.arange(num_rows - first)), whole.of(tensor)[first:])


def test_every_column_has_its_share() -> None:
    counts = torch.zeros(1, 768)
    columns = columns_of(torch.empty(768, 768, device="meta"), 16)
    assert columns is not None
    kept = columns.of(torch.arange(768.0).expand(768, 768)).flatten().long()
    counts.view(-1).index_add_(0, kept, torch.ones(len(kept)))
    assert set(counts.view(-1).tolist()) == {768 / 16}


def test_small_and_narrow_tensors_are_kept_whole() -> None:
    assert columns_of(torch.empty(SMALL_TENSOR - 1), 16) is None
    assert columns_of(torch.empty(SMALL_TENSOR), 16) is not None
    assert columns_of(torch.empty(SMALL_TENSOR), 1) is None
    assert columns_of(torch.empty(SMALL_TENSOR, 3), 16) is None  # two columns of three are as good as all
    narrow = columns_of(torch.empty(SMALL_TENSOR, 4), 16)
    assert narrow is not None
    assert narrow.shape[1] == 2


# -- how much, and where ----------------------------------------------------------------------------------------------


def gpt(num_layers: int = 12, width: int = 768) -> list[nn.Parameter]:
    """The shapes of GPT-2 with 124M parameters, and no memory."""
    layer = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,),
             (4 * width, width), (4 * width,), (width, 4 * width), (width,)]  # fmt: skip
    shapes = [(50257, width), (1024, width), *layer * num_layers, (width,), (width,)]
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


def test_large_models_keep_a_sixteenth_and_what_they_go_back_to_on_the_host() -> None:
    """A quarter of a byte a parameter on the device, and one while a sample is taken."""
    parameters = gpt()
    optimizer = torch.optim.AdamW(parameters)
    count = num_parameters(optimizer)
    assert count == pytest.approx(124e6, rel=0.01)
    anchor = Anchor(stride=stride_of(None, optimizer))
    anchor.renew(parameters)
    anchor_bytes = sum(copy.nbytes for copy in anchor.copies)
    in_use = 3 * anchor_bytes  # what is read of the weights, of the gradient, and their difference
    assert host_if_large(optimizer) == torch.device("cpu")
    assert (anchor_bytes + in_use) / count < 1.1
    assert anchor_bytes / count == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("size", [LARGE_MODEL, LARGE_MODEL + 1])
def test_small_models_keep_all_beside_the_weights(size: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(size, device="meta"))])
    large = size > LARGE_MODEL
    assert stride_of(None, optimizer) == (16 if large else 1)
    assert host_if_large(optimizer) == (torch.device("cpu") if large else None)
    assert stride_of(1, optimizer) == stride_of(1.0, optimizer) == 1
    assert stride_of(1 / 256, optimizer) == 256


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3), st.data())
def test_the_first_row_of_a_shard_is_that_of_chunks_of_chunks(
    num_rows: int, mesh_dims: list[tuple[int, bool]], data: st.DataObject
) -> None:
    coordinate = [data.draw(st.integers(0, size - 1)) for size, _ in mesh_dims]
    rows = torch.arange(num_rows)
    for place, (size, cuts) in zip(coordinate, mesh_dims, strict=True):
        chunks = rows.chunk(size) if cuts else [rows] * size
        rows = chunks[place] if place < len(chunks) else rows[:0]
    mesh: Any = SimpleNamespace(shape=tuple(size for size, _ in mesh_dims), get_coordinate=lambda: coordinate)
    placements = [Shard(0) if cuts else Replicate() for _, cuts in mesh_dims]
    first = _first_row(Sharding(mesh, placements, torch.Size([num_rows, 8]), (8, 1)))
    assert not len(rows) or first == rows[0]


def test_copies_of_weights_on_the_host_stay_there() -> None:
    at_home = torch.optim.SGD([nn.Parameter(torch.empty(1).expand(LARGE_MODEL + 1))])
    assert num_parameters(at_home) > LARGE_MODEL
    assert host_if_large(at_home) is None


class Unpinned(PinnedMemory):
    """Memory that a machine without a GPU has too."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs: list[int] = []

    def _allocate(self, num_bytes: int) -> Tensor:
        self.slabs.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_memory_is_taken_in_slabs() -> None:
    memory = Unpinned()
    likes = [torch.empty(shape, dtype=dtype) for shape in ((3, 5), (), (0, 4), (1000,)) for dtype in
             (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)] * 20  # fmt: skip
    found = [memory.empty_like(t).fill_(1) for t in likes]
    for mine, like in zip(found, likes, strict=True):
        assert (mine.shape, mine.dtype) == (like.shape, like.dtype)
        assert mine.is_contiguous()
        assert bool((mine == 1).all())  # nobody else has written there
    assert len(memory.slabs) == 1
    large = memory.empty_like(torch.empty(2**22, device="meta"))
    assert large.nbytes == memory.slabs[-1] == 2**24
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in [*found, large] if t.numel())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert math.log2(memory.slabs[0]) == 20
