"""A GPT under FSDP2 with AutoLR: on one process, sharded over several, and killed in mid-run and resumed.

    python lab/benchmarks/sharded.py --data data --json sharded.json                # four CPU processes, a small model
    python lab/benchmarks/sharded.py --device cuda --layers 12 --width 768          # four processes share one GPU

Every run sees the same batches, each rank its part of them. The killed run saves with ``torch.distributed.checkpoint``
every 50 steps; one of its ranks kills itself with SIGKILL, and fresh processes continue from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hdet import AutoLR, __version__
from hdet.launch import ReplicaError, launch
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256
from overhead import GPT

SAVE_EVERY = 50


def train(args: argparse.Namespace, folder: str, kill_at: int = 0, resume: bool = False) -> dict[str, Any]:
    """One run on the ranks of this process group; the last rank kills itself at step ``kill_at``."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    text = (args.data / "tinyshakespeare" / "input.txt").read_bytes()
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(args.device)
    split = int(0.9 * len(tokens))
    offsets = torch.arange(args.length + 1, device=args.device)
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.length, vocabulary=256).to(args.device)
    if num_ranks > 1:
        mesh = init_device_mesh(args.device, (num_ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = AutoLR(optimizer, total_steps=args.steps, model=model)

    def loss_of(starts: Tensor) -> Tensor:
        mine = starts.to(args.device)[rank::num_ranks]
        rows = tokens[mine[:, None] + offsets].long()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    first = 0
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments, "scheduler": scheduler}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = scheduler.last_epoch
    begun = time.perf_counter()
    for step in range(first, args.steps):
        batches = torch.Generator().manual_seed(1000 * args.seed + step)
        loss = loss_of(torch.randint(split - args.length - 1, (args.batch,), generator=batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss)
        if kill_at:
            if step + 1 == kill_at and rank == num_ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if (step + 1) % SAVE_EVERY == 0:
                weights, moments = get_state_dict(model, optimizer)
                save({"model": weights, "optimizer": moments, "scheduler": scheduler}, checkpoint_id=folder)
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        starts = torch.linspace(split, len(tokens) - args.length - 2, 256).long()
        losses = torch.stack([loss_of(part) for part in starts.view(8, 32)]).mean().cpu()
    dist.all_reduce(losses)
    found = scheduler.found()
    return {
        "ranks": num_ranks,
        "first_step": first,
        "validation": round(float(losses) / num_ranks, 5),
        "lr": found.peak_lrs[0],
        "found": str(found),
        "rollbacks": scheduler.history[-1].num_rollbacks,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 4, "steps": 500, "layers": 4, "width": 128, "length": 128, "batch": 32, "kill_at": 350}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path, help="write every run here, after each")
    args = parser.parse_args()
    record: dict[str, Any] = {"hdet": __version__, "torch": torch.__version__, "runs": []}
    record |= {name: getattr(args, name) for name in (*defaults, "device")}
    record |= {"git_commit": provenance.git_commit(), "code_sha256": code_sha256()}

    def add(name: str, result: dict[str, Any]) -> None:
        record["runs"].append({"name": name, "seed": args.seed, **result})
        print(f"{name}, seed {args.seed}: {result}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record) + "\n")

    for seed in args.seeds:
        args.seed = seed
        with tempfile.TemporaryDirectory() as folder:
            add("one process", launch(train, 1, args, folder, timeout_s=600)[0])
            add("sharded", launch(train, args.ranks, args, folder, timeout_s=600)[0])
            try:
                launch(train, args.ranks, args, folder, args.kill_at, timeout_s=600)
                raise SystemExit("the rank was not killed")
            except ReplicaError as error:
                print(str(error).splitlines()[0], flush=True)
            add("killed and resumed", launch(train, args.ranks, args, folder, 0, True, timeout_s=600)[0])


if __name__ == "__main__":
    main()
