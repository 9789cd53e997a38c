"""probe= and weight_decay="learn" with a compiled optimizer step, with torch.distributed.checkpoint and with shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hdet import Adapt, AutoLR
from job import launch

pytestmark = pytest.mark.slow

NUM_STEPS, SAVED_AT = 60, 33


class Run:
    """A network on noise: every rank has batches, and probes, of its own."""

    def __init__(self, kind: str = "", *, compiles: bool = False, rank: int = 0, **options: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        elif kind.startswith("fsdp1"):
            original = kind.endswith("original")
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        self.model, self.rank, self.step, self.num_probes = model, rank, 0, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)
        self.scheduler = AutoLR(
            self.optimizer, total_steps=NUM_STEPS, model=model, probe=self.probe, interval=5, weight_decay="learn",
            adapt=Adapt(level=False),
        )  # fmt: skip
        signal: Any = self.scheduler._run.signals[0]
        signal.probe_every = 3
        self.counter = CompileCounter()
        self.update = torch.compile(self.optimizer.step, backend=self.counter) if compiles else self.optimizer.step

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + self.rank)
        x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
        noise = torch.randn(16, 1, generator=generator, dtype=torch.float64)
        return nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True) + noise)

    def probe(self) -> Tensor:
        self.num_probes += 1
        return self.loss(1000 + self.num_probes)

    def advance(self, until: int) -> list[float]:
        """Weights, learning rate and weight decay after each step."""
        found = []
        while self.step < until:
            self.optimizer.zero_grad()
            loss = self.loss(self.step)
            torch.autograd.backward(loss)
            self.update()
            self.scheduler.step(loss.detach())
            self.step += 1
            group = self.optimizer.param_groups[0]
            weights = [w for p in self.model.parameters() for w in _whole(p).flatten().tolist()]
            found += [*weights, float(group["lr"]), float(group["weight_decay"])]
        return found

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        mine = {"step": self.step, "num_probes": self.num_probes}
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "loop": mine}

    def load(self, path: str) -> None:
        state = self.state()
        load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.num_probes = state["loop"]["step"], state["loop"]["num_probes"]


def _whole(parameter: Tensor) -> Tensor:
    whole = getattr(parameter, "full_tensor", None)
    return parameter.detach() if whole is None else whole().detach()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_step_uses_the_weight_decay_that_was_learned(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, compiled = Run(**options), Run(compiles=True, **options)
    expected, found = plain.advance(NUM_STEPS), compiled.advance(NUM_STEPS)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    decays = [record.knobs["weight_decay"].base for record in compiled.scheduler.history]
    assert len(set(decays)) > 5
    assert 0 < compiled.counter.frame_count <= 4  # a number that has changed is an input from then on, not a constant


def _resumes(folder: str) -> dict[str, Any]:
    found = {}
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    for kind in ("ddp", "fsdp"):
        whole = Run(kind, rank=rank)
        whole.advance(SAVED_AT)
        path = str(whole.scheduler._run.signals[0].state_dict()["decay"][0]["path"]["copies"][0].abs().sum() > 0)
        with whole.scheduler.converged():
            save(whole.state(), checkpoint_id=f"{folder}/{kind}")
        expected = whole.advance(NUM_STEPS)
        resumed = Run(kind, rank=rank)
        resumed.load(f"{folder}/{kind}")
        found[kind] = (expected, resumed.advance(NUM_STEPS), path)
    return found


def test_a_run_is_resumed_exactly_from_a_checkpoint_in_mid_round(tmp_path: Path) -> None:
    rows = launch(_resumes, 2, str(tmp_path))
    for row in rows:
        for expected, found, path in row.values():
            assert found == expected
            assert "True" in path  # there was something to save of D
            assert len(set(expected[-1::-27])) > 1
    assert rows[0]["ddp"][1] == pytest.approx(rows[0]["fsdp"][1], rel=1e-6, abs=1e-9)


def _refusals() -> list[str]:
    said = []
    for kind in ("fsdp1", "fsdp1, original"):
        with pytest.raises(ValueError, match="probe= needs") as caught:
            Run(kind, rank=dist.get_rank())
        said.append(str(caught.value))
    return said


@pytest.mark.filterwarnings("ignore")
def test_the_first_version_of_fsdp_is_refused_in_words() -> None:
    for row in launch(_refusals, 2):
        assert all("FullyShardedDataParallel (FSDP1)" in text and "use fully_shard, or DDP" in text for text in row)
