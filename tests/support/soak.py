"""Many short trainings that things happen to: python tests/support/soak.py --scenarios 200 --seed 0.

Each scenario is drawn from its seed: how many replicas, shared or local gradients, which scheduler, which faults. It
ends in time, and either as one finite model after the right number of steps, with the fault on record and, where
nothing could change the numbers, the weights of an undisturbed run; or in an error that was promised, naming replicas
and steps.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from hdet.testing import ReplicaError, assert_same_weights, launch
from soak_scenarios import (
    CURVATURE,
    FAULTY,
    INTERVAL,
    KINDS,
    LR,
    NUM_STEPS,
    STORIES,
    Scenario,
    both,
    draw,
    first_part,
    second_part,
    target,
)

DEADLINE_S = 40.0

PROMISED = (
    r"replicas must take the same number of steps between converges, but got replica 0: \d+, replica 1: \d+",
    r"replica \d+ lost the others at the converge of step \d+; last converge reached by .*: \{\d+: \d+",
    r"the weights of all \d+ replicas are not finite at the converge of step \d+",
    r"training broke again at step \d+ after \d+ rollbacks",
    r"scheduler.step\(\) must follow every optimizer step on all replicas, .* up to step \d+ .* replica 0: \d+",
    r"injected into replica \d+ in step \d+",
)


# -- what must have come of it --------------------------------------------------------------------------------------


def run(scenario: Scenario) -> str:
    """The outcome in a few words. AssertionError where it is none that was promised."""
    with tempfile.TemporaryDirectory(prefix="hdet-soak-") as folder:
        if scenario.story == "kill and restart":
            (killed,) = scenario.faults
            died = ""
            try:
                launch(first_part, scenario.num_replicas, scenario, folder, timeout_s=DEADLINE_S)
            except ReplicaError as error:
                died = error.errors[killed.replica]
            assert died == "the process ended without reporting an error", died
        if scenario.then_on:
            launch(first_part, scenario.num_replicas, scenario, folder, timeout_s=DEADLINE_S)
        in_two = scenario.then_on or scenario.story == "kill and restart"
        part, count = (second_part if in_two else both), scenario.then_on or scenario.num_replicas
        results = launch(part, count, scenario, folder, timeout_s=DEADLINE_S)
    return judge(scenario, results)


def judge(scenario: Scenario, results: list[dict[str, Any]]) -> str:
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        if scenario.story in ("skipped step", "error"):
            silent = [step for result in results for step in result["rounds"] if step >= scenario.faults[0].step]
            assert not silent, f"unequal steps were averaged at steps {silent}"
        return _judge_errors(scenario, errors, len(results))
    assert scenario.story not in ("error", "skipped step"), "an error was promised"
    assert_same_weights([result["weights"] for result in results])
    weights = results[0]["weights"]
    assert all(bool(torch.isfinite(t).all()) for t in weights.values()), "weights must be finite"
    steps = [result["step"] for result in results]
    assert steps == [NUM_STEPS] * len(results), f"replicas took {steps} steps"
    records = results[0]["records"]
    alone = len(results) == 1 and scenario.face != "gradient"
    first = scenario.resume_at // INTERVAL if scenario.resume_at else 0
    searched = [1, 2, 3] if scenario.searches and not scenario.resume_at else []
    expected = [] if alone else [*searched, *range((first + 1) * INTERVAL, NUM_STEPS + 1, INTERVAL)]
    assert [record[0] for record in records] == expected, f"rounds ended at {[r[0] for r in records]}"
    for result in results:
        # NaN is not equal to itself, its text is
        assert repr(result["records"]) == repr(records), "replicas must keep the same record"
    undone = records[-1][3] if records else 0
    if len(scenario.faults) == 1 and scenario.story in KINDS:
        _judge_record(scenario, records)
    if scenario.story in ("nothing", "slow rank", "kill and restart", "resume at a round's end"):
        assert undone == 0, f"{undone} rounds undone"
        assert not any(record[2] for record in records), "nobody was faulty"
        if scenario.repeatable:
            _judge_weights(scenario, weights, results[0]["undisturbed"]["weights"])
            _judge_simulation(scenario, weights)
            return "as undisturbed"
        return "one model"
    if _judge_simulation(scenario, weights):
        return "as simulated"
    return "undone, one model" if undone else "one model"


def _judge_errors(scenario: Scenario, errors: list[str], count: int) -> str:
    assert len(errors) == count, f"{len(errors)} of {count} replicas know of it: {errors}"
    promised = [error for error in errors if any(re.search(text, error) for text in PROMISED)]
    if scenario.gradients == "shared" and scenario.story in ("skipped step", "error"):
        # Who waits for gradients hears of it from DistributedDataParallel.
        assert promised, errors
        return "error, as promised"
    others = [error for error in errors if error not in promised]
    assert not others, others
    faulty = {fault.replica for fault in scenario.faults if fault.kind in FAULTY}
    everyone = faulty and (scenario.gradients == "shared" or len(faulty) == scenario.num_replicas)
    out_of_step = scenario.story in ("skipped step", "error")
    assert out_of_step or everyone, f"nothing here is worth an error: {errors}"
    return "error, as promised"


def _judge_record(scenario: Scenario, records: list[Any]) -> None:
    (fault,) = scenario.faults
    struck = [record for record in records if record[0] >= fault.step]
    struck = struck if fault.until == math.inf else struck[:1]
    if fault.kind == "nan_gradient" and scenario.handling.skip_nonfinite:
        assert not any(record[2] for record in records), f"a gradient that was left out did harm: {records}"
    elif fault.kind in FAULTY and struck:
        if scenario.gradients == "local":
            recorded = [record[2] for record in struck]
            assert recorded == [(fault.replica,)] * len(struck), f"unhealthy replicas on record: {recorded}"
        else:  # it has reached everyone, or nobody yet
            assert struck[0][2] or struck[0][3], records
            assert len(struck[0][2]) in (1, scenario.num_replicas), records
    if fault.kind != "explode":
        assert not any(record[4] for record in records), f"healthy replicas quarantined: {records}"
    # It shows in the loss from the next step on; what is usual has to be known by then.
    elif scenario.handling.quarantine and scenario.gradients == "local" and fault.step > 4 * INTERVAL:
        assert fault.step % INTERVAL == 0 or struck[0][4] == (fault.replica,), f"not quarantined: {struck[0]}"
    if fault.kind == "nan_loss":
        assert all(math.isnan(record[1][fault.replica]) for record in struck), records
        # The loss of a model is the mean over its ranks. While the level is searched nothing is undone.
        is_one_model = scenario.face == "gradient" and scenario.gradients == "shared"
        undone = [record[3] > 0 for record in struck]
        assert undone == [is_one_model and record[0] > INTERVAL for record in struck], records


def _judge_weights(scenario: Scenario, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if scenario.exact:
        assert_same_weights([expected, weights])
    else:
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


def _judge_simulation(scenario: Scenario, weights: dict[str, Tensor]) -> bool:
    """Nothing lost: plain local SGD, where a faulty replica is left out of one mean, on one processor."""
    faulty = {fault.replica: fault.step for fault in scenario.faults if fault.kind in FAULTY and fault.until is None}
    harmless = all(
        fault.kind in ("slow", "nan_loss", "kill") for fault in scenario.faults if fault.replica not in faulty
    )
    whole = len(faulty) + sum(fault.kind == "slow" for fault in scenario.faults) == len(scenario.faults) or not faulty
    plain = scenario.face == "local sgd" and not scenario.adam and scenario.resume_at % INTERVAL == 0
    left_out = {
        f.replica: f.step for f in scenario.faults if f.kind == "nan_gradient" and scenario.handling.skip_nonfinite
    }
    if not (plain and harmless and whole) or scenario.then_on or len(faulty) == scenario.num_replicas:
        return False
    replicas = np.zeros((scenario.num_replicas, 2, 3))
    healthy = np.ones(scenario.num_replicas, dtype=bool)
    for step in range(1, NUM_STEPS + 1):
        for r in range(scenario.num_replicas):
            if left_out.get(r) != step:
                replicas[r] -= LR * CURVATURE * (replicas[r] - target(scenario, step, r))
                healthy[r] &= faulty.get(r) != step
        if step % INTERVAL == 0:
            replicas[:] = replicas[healthy].mean(axis=0)
            healthy[:] = True
    found = np.stack([t.numpy() for t in weights.values()])
    np.testing.assert_allclose(found, replicas[0], rtol=1e-9)
    return True


# -- all of them ----------------------------------------------------------------------------------------------------


def soak(scenarios: Iterable[Scenario], *, at_a_time: int = 2) -> Iterator[tuple[Scenario, str, str]]:
    """Each scenario with its outcome, and what went wrong if something did."""

    def attempt(scenario: Scenario) -> tuple[Scenario, str, str]:
        try:
            return scenario, run(scenario), ""
        except TimeoutError as error:
            return scenario, "HANG", str(error)
        except Exception as error:
            return scenario, "WRONG", f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(at_a_time) as pool:
        yield from pool.map(attempt, scenarios)


def summary(found: list[tuple[Scenario, str, str]]) -> Table:
    outcomes = sorted({outcome for _, outcome, _ in found})
    counts = collections.Counter((scenario.story, outcome) for scenario, outcome, _ in found)
    table = Table("fault", *outcomes, "all")
    for story in (*STORIES, None):
        row = [sum(n for (s, o), n in counts.items() if story in (s, None) and o == outcome) for outcome in outcomes]
        table.add_row(story or "all", *(str(n or "") for n in row), str(sum(row)), end_section=story == STORIES[-1])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    started = time.monotonic()
    scenarios = [draw(options.seed, index) for index in range(options.scenarios)]
    found = list(track(soak(scenarios), "soak", total=len(scenarios), console=console))
    console.print(summary(found))
    for scenario, outcome, text in found:
        if text:
            console.print(f"{outcome}: {scenario}\n{text}\n", markup=False, soft_wrap=True)
    console.print(f"{len(found)} scenarios of seed {options.seed} in {time.monotonic() - started:.0f} s")
    sys.exit(any(text for _, _, text in found))


if __name__ == "__main__":
    main()
