"""The Trainer of torchtitan on two processes, hybrid-sharded 2 x 1.

It is made for GPUs. Here its device is the CPU, and what has no counterpart there is replaced: the attention kernel,
which has no backward pass, the memory monitor, and the barrier with device numbers after the first step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import framework_task as task
from framework_task import Results
from hdet import Adapt
from native import error

pytest.importorskip("torchtitan", reason="pip install 'hdet[torchtitan]' triton")
pytest.importorskip("triton", reason="torchtitan imports it; pip install triton")

pytestmark = pytest.mark.timeout(300)  # it takes its time to start

STEPS, SAVED_STEP, VOCABULARY = 12, 6, 64
LOSS = {"signal": "loss", "interval": 4, "adapt": Adapt(spread=0.3, start_steps=0, first_scale=0.5)}
GRADIENT = {"interval": 2, "adapt": Adapt(start_steps=0, first_scale=0.5)}


def _on_the_cpu() -> None:
    from types import SimpleNamespace

    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    utils.get_local_device = lambda: torch.device("cpu")

    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed
    from torchtitan.models.common.attention import FlexAttention

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: Any, enable_gqa: bool, **others: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), SimpleNamespace(lse=None)

    FlexAttention.compiled_flex_attn = staticmethod(attention)
    nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    distributed.set_pg_timeouts = lambda **arguments: None


def _config(folder: str, *, save: bool) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Sequences(BaseDataLoader):
        """Counts by threes, from anywhere."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any) -> None:
            self.rank, self.length, self.num_rows, self.number = dp_rank, seq_len, local_batch_size, 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(self.number * 2 + self.rank)
                self.number += 1
                first = torch.randint(0, VOCABULARY, (self.num_rows, 1), generator=generator)
                tokens = (first + 3 * torch.arange(self.length + 1)) % VOCABULARY
                positions = torch.arange(self.length).expand(self.num_rows, -1)
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.number}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.number = state_dict["number"]

    class Nothing(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any = None, *, tokenizer_path: str = "") -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    config = llama3_debugmodel()
    config.dump_folder = folder
    config.dataloader, config.tokenizer = Sequences.Config(), Nothing.Config()
    config.training = dataclasses.replace(
        config.training,
        seq_len=16,
        local_batch_size=2,
        global_batch_size=8,  # two micro-batches a step
        steps=STEPS,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.validator.enable = False
    config.checkpoint.enable, config.checkpoint.interval = save, SAVED_STEP
    config.activation_checkpoint = None
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def _fit(settings: dict[str, Any], folder: str, *, save: bool = False, load: bool = False) -> dict[str, Any]:
    from torchtitan.trainer import Trainer

    from hdet.integrations.torchtitan import attach

    config = _config(folder, save=save or load)
    if load:
        config.checkpoint.load_step = SAVED_STEP
    trainer = Trainer(config)
    lrs = task.watch(trainer.lr_schedulers.schedulers[0].optimizer)
    seen: list[Any] = []
    scheduler = attach(trainer, sinks=[lambda record, names: seen.append(record)], **settings)
    trainer.train()
    weights = [p.to_local().double().sum().item() for p in trainer.model_parts[0].parameters()]
    trainer.close()
    return {
        "lrs": [lr for lr in lrs if lr > 0],  # before it loads, torchtitan takes a step that moves nothing
        "weights": weights,
        "last_epoch": scheduler.last_epoch,
        "losses": [record.losses for record in scheduler.history],
        "scales": [record.scales for record in scheduler.history],
        "seen": len(seen),
    }


def _all(folder: str) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    _on_the_cpu()
    from hdet.integrations.torchtitan import attach

    return {
        "gradient": _fit(GRADIENT, f"{folder}/gradient"),
        "loss": _fit(LOSS, f"{folder}/loss", save=True),
        "resumed": _fit(LOSS, f"{folder}/loss", load=True),
        "other": error(lambda: attach(task.Model())),
    }


results = task.on_two_processes(_all, timeout_s=280)


def test_one_optimizer_step_is_one_step(results: Results) -> None:
    for name, num_rounds in (("gradient", 6), ("loss", 3)):
        for replica in results[0]:
            assert replica[name]["last_epoch"] == len(replica[name]["lrs"]) == STEPS
            assert len(replica[name]["scales"]) == replica[name]["seen"] == num_rounds
            assert replica[name]["scales"] == results[0][0][name]["scales"]
            assert len(set(replica[name]["scales"])) > 1  # it learns
            # A language model that knows nothing, and then something: losses are means over tokens.
            assert replica[name]["losses"][0] == pytest.approx([7.5, 7.5], abs=2.0)
            assert sum(replica[name]["losses"][-1]) < sum(replica[name]["losses"][0])


def test_replicas_of_the_replicate_dimension_fan_out_and_end_as_one_model(results: Results) -> None:
    first, second = results[0]
    assert first["gradient"]["lrs"] == second["gradient"]["lrs"]
    assert all(a != b for a, b in zip(first["loss"]["lrs"], second["loss"]["lrs"], strict=True))
    for name in ("gradient", "loss"):
        assert first[name]["weights"] == second[name]["weights"]


def test_a_checkpoint_in_the_middle_of_a_round_resumes(results: Results) -> None:
    for replica in results[0]:
        resumed, whole = replica["resumed"], replica["loss"]
        assert resumed["last_epoch"] == STEPS
        # The mean and the anchor are saved, not each replica's own place: close, not equal.
        assert resumed["lrs"] == pytest.approx(whole["lrs"][SAVED_STEP:], rel=1e-2)
        assert resumed["scales"][-1] == pytest.approx(whole["scales"][-1], rel=1e-2)
    assert results[0][0]["resumed"]["weights"] == results[0][1]["resumed"]["weights"]


def test_another_trainer_is_refused(results: Results) -> None:
    for replica in results[0]:
        assert "TypeError: trainer must be a torchtitan Trainer, but got Model" in replica["other"]
