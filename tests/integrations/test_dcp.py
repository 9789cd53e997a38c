"""torch.distributed.checkpoint in mid-round: one model, never a mixture, from which a run continues."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from hdet.launch import launch
from job import alike, error, everyone
from native import FACES, TOTAL_STEPS, Run, net

Found = list[dict[str, Any]]
SAVED_AT = 6


class _App(Stateful):
    """Model and optimizer, as the tutorial of torch.distributed.checkpoint has them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.run.model,
            self.run.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


@functools.cache
def _group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group()
    return group


def _run(name: str, **options: Any) -> Run:
    return Run(DistributedDataParallel(net()), FACES[name], (dist.get_rank(), dist.get_world_size()), **options)


def _state(run: Run) -> dict[str, Any]:
    return {"app": _App(run), "scheduler": run.scheduler}


def _save(run: Run, path: str, *, how: str) -> None:
    with run.converged():
        if how == "dcp":
            save(_state(run), checkpoint_id=path)
        elif how == "async":
            # In a group of its own: the thread that writes must not mix its collectives with those of training.
            run.pending = async_save(_state(run), checkpoint_id=path, process_group=_group())  # type: ignore[attr-defined]
        else:
            if dist.get_rank() == 0:
                model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
                torch.save({"model": model, "optimizer": optimizer, "scheduler": run.scheduler.state_dict()}, path)
            dist.barrier()


def _load(run: Run, path: str, *, how: str) -> None:
    if how in ("dcp", "async"):
        load(_state(run), checkpoint_id=path)
    else:
        state = torch.load(path, weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.scheduler.load_state_dict(state["scheduler"])


def _resumes(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in FACES:
        for how in ("dcp", "async", "file"):
            path = f"{folder}/{name}-{how}"
            whole = _run(name)
            whole.advance(SAVED_AT)
            if name == "paper":  # replicas go on from the mean, as those do that are loaded
                whole.scheduler.converge()
            with whole.converged():
                mean = whole.weights()
            out[f"{name}, {how}: mean"] = mean
            _save(whole, path, how=how)
            expected = whole.advance(TOTAL_STEPS)
            if how == "async":
                whole.pending.result()  # type: ignore[attr-defined]
                dist.barrier()
            resumed = _run(name)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated")
                _load(resumed, path, how=how)
            out[f"{name}, {how}"] = (expected, resumed.advance(TOTAL_STEPS), whole.told()[1:], resumed.told())
    return out


def _details(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    run = _run("paper")
    out["stateful"] = all(isinstance(_run(name).scheduler, Stateful) for name in FACES)
    run.advance(SAVED_AT)
    own = everyone(run.weights())
    out["apart"] = own[0] != own[1]
    with run.scheduler.converged():
        save(_state(run), checkpoint_id=f"{folder}/mixture")
        out["alike inside"] = alike(run.weights())
    out["own weights back"] = run.weights() == own[dist.get_rank()]
    out["mean"] = np.mean(own, axis=0).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(_state(run), checkpoint_id=f"{folder}/outside")
    out["warned"] = [str(w.message) for w in caught if "where replicas are apart" in str(w.message)]

    # The dry run, in which an optimizer makes its state, is not a training step.
    for name in ("loss", "gradient", "nesterov"):
        run, twin = (_run(name, make=torch.optim.SGD) for _ in range(2))  # Adam would have counted it
        get_state_dict(run.model, run.optimizer)
        with torch.no_grad():
            for each in (run, twin):
                for p in each.model.parameters():
                    p.mul_(1.5)  # weights from elsewhere, without a scheduler's state
        loop = run.scheduler._run
        assert loop.anchor is not None
        out[f"{name}: not begun"] = loop.anchor.copies == []
        out[f"{name}: twins"] = run.advance(10) == twin.advance(10) and repr(run.told()) == repr(twin.told())

    # A stateless optimizer takes one every time.
    runs = [_run("gradient", make=torch.optim.SGD) for _ in range(2)]
    for saves, run in enumerate(runs):
        run.advance(6)
        if saves:
            run.optimizer.zero_grad()
            get_state_dict(run.model, run.optimizer)
        run.advance(10)
    out["no sample of nothing"] = repr(runs[0].told()) == repr(runs[1].told())

    # The checkpoint of another scheduler.
    out["other"] = error(lambda: load({"scheduler": _run("gradient").scheduler}, checkpoint_id=f"{folder}/mixture"))
    return out


def _all(folder: str) -> dict[str, Any]:
    return {"resumes": _resumes(folder), "details": _details(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return launch(_all, 2, str(folder), timeout_s=150)


def _read(path: Path) -> list[float]:
    """The model of a checkpoint, read by a process that knows nothing of replicas."""
    model: nn.Module = net()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"app": {"model": model.state_dict()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=path, no_dist=True)
    return [v for t in state["app"]["model"].values() for v in t.flatten().tolist()]


@pytest.mark.parametrize("how", ["dcp", "async", "file"])
@pytest.mark.parametrize("name", FACES)
def test_a_run_continues_from_a_checkpoint_in_mid_round(found: Found, folder: Path, name: str, how: str) -> None:
    for result in found:
        expected, got, told, told_again = result["resumes"][f"{name}, {how}"]
        assert len(got) == TOTAL_STEPS - SAVED_AT
        for (lrs, weights), (other_lrs, other_weights) in zip(got, expected, strict=True):
            assert_allclose(lrs, other_lrs, rtol=1e-9)
            assert_allclose(weights, other_weights, rtol=1e-8, atol=1e-10)
        for (step, losses, scales, _), (other_step, other_losses, other_scales, _) in zip(
            told, told_again, strict=True
        ):
            assert step == other_step
            assert_allclose(losses, other_losses, rtol=1e-9)
            assert_allclose(scales, other_scales, rtol=1e-9)
        if how != "file":
            assert_allclose(_read(folder / f"{name}-{how}"), result["resumes"][f"{name}, {how}: mean"], rtol=1e-12)


def test_the_mean_is_saved_not_a_mixture(found: Found, folder: Path) -> None:
    assert_allclose(_read(folder / "mixture"), found[0]["details"]["mean"], rtol=1e-12)
    for result in found:
        for name in ("stateful", "apart", "alike inside", "own weights back"):
            assert result["details"][name], name


def test_saving_outside_converged_warns(found: Found) -> None:
    for result in found:
        assert len(result["details"]["warned"]) == 1
        assert "state_dict() at step 6, where replicas are apart" in result["details"]["warned"][0]


def test_a_dry_run_of_the_optimizer_is_not_a_training_step(found: Found) -> None:
    for result in found:
        for name in ("loss", "gradient", "nesterov"):
            assert result["details"][f"{name}: not begun"]
            assert result["details"][f"{name}: twins"]
        assert result["details"]["no sample of nothing"]


def test_a_checkpoint_of_another_scheduler_is_refused(found: Found) -> None:
    for result in found:
        assert "Missing key in checkpoint state_dict: scheduler." in result["details"]["other"]
