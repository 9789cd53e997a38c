"""A conformance suite for controllers: what every one of them must do, whatever it decides.

It needs no test framework: call :func:`check_controller` in a test of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hdet.checks import FloatArray
from hdet.controllers.base import Controller, Decision, Evidence, pack_state, unpack_state
from hdet.policy.spread import fan_out

NUM_ROUNDS = 10
TOLERANCE = 1e-6
"""Relative; sums in another order differ in the last digits, and a steep controller magnifies them."""


def check_controller(
    make: Callable[[], Controller], *, num_knobs: Sequence[int] = (1, 3), num_replicas: Sequence[int] = (2, 4, 8)
) -> None:
    """Raise AssertionError with the first rule of the contract that a controller breaks.

    The rules: an update is a pure function; the state is a NamedTuple of float arrays, each dimension 1 or K long, that
    survives saving; factors are positive and finite, one for each knob; info holds
    tuples of floats; neither the order of the replicas nor a constant added to all losses matters; reordering the knobs
    reorders the decision; losses and slopes that are not finite never do harm, and a round that shows nothing moves
    nothing.

    Args:
        make: returns a new controller; called several times.
        num_knobs: numbers of knobs to try.
        num_replicas: numbers of replicas to try.

    Example:
        >>> from hdet.controllers import EvidenceController
        >>> from hdet.testing import check_controller
        >>> check_controller(lambda: EvidenceController(gain=0.2))
    """
    for knobs in num_knobs:
        for replicas in num_replicas:
            try:
                _check(make, knobs, replicas)
            except AssertionError as error:
                raise AssertionError(f"{error} (with {knobs} knobs and {replicas} replicas)") from None


def _check(make: Callable[[], Controller], num_knobs: int, num_replicas: int) -> None:
    rounds = _rounds(num_knobs, num_replicas)
    _check_state(make().init(num_knobs), num_knobs)
    for history in (rounds, _with_slopes(rounds), _with_bad_slopes(rounds), *_with_bad_losses(rounds)):
        _check_walk(make(), history)
        _check_pure(make(), history)
    for history in (rounds, _with_slopes(rounds)):
        _check_saving(make(), history)
        _check_order_of_replicas(make(), history)
        _check_order_of_knobs(make(), history)
        _check_constant(make(), history)
    _check_silence(make(), rounds)


# -- evidence to try ------------------------------------------------------------------------------------------------


def _rounds(num_knobs: int, num_replicas: int) -> list[Evidence]:
    """Losses that prefer higher values, with noise."""
    rng = np.random.default_rng([num_knobs, num_replicas])
    found = []
    for index in range(NUM_ROUNDS):
        rho = fan_out(num_replicas, 0.1, seed=1, round_index=index, num_knobs=num_knobs)
        losses = 3 - 0.2 * index - 0.5 * (rho[0] - 1) + 0.02 * rng.normal(size=num_replicas)
        seen = Evidence(losses, rho, elapsed=1 / (index + 1), progress=index / NUM_ROUNDS)
        scales = np.arange(num_knobs, dtype=np.float64) + 0.5
        found.append(seen._replace(start=(3.2, 0.02), update=0.004, scales=scales, level=0.5))
    return found


def _with_slopes(rounds: list[Evidence]) -> list[Evidence]:
    rng = np.random.default_rng(len(rounds[0].multipliers))
    shape = len(rounds[0].multipliers)
    return [e._replace(slopes=(rng.normal(-0.1, 0.1, shape), rng.uniform(0.01, 0.1, shape))) for e in rounds]


def _with_bad_slopes(rounds: list[Evidence]) -> list[Evidence]:
    found = []
    for index, evidence in enumerate(_with_slopes(rounds)):
        assert evidence.slopes is not None
        slope, error = evidence.slopes
        if index % 3 != 1:
            error = np.full_like(error, np.nan)
        if index % 3 != 0:
            slope = np.where(np.arange(len(slope)) % 2 == 0, np.nan, slope)
        found.append(evidence._replace(slopes=(slope, error)))
    return found


def _with_bad_losses(rounds: list[Evidence]) -> list[list[Evidence]]:
    """Some or all replicas without a finite loss, losses that are all the same, and losses beyond all reason."""
    histories = []
    for bad in (np.nan, np.inf, -np.inf):
        some = [_with_loss(e, bad, [i % len(e.losses)]) for i, e in enumerate(rounds)]
        most = [_with_loss(e, bad, list(range(1, len(e.losses)))) for e in rounds]
        all_in_turn = [_with_loss(e, bad, list(range(len(e.losses)))) if i % 2 else e for i, e in enumerate(rounds)]
        histories += [some, most, all_in_turn]
    return [
        *histories,
        [e._replace(losses=np.full_like(e.losses, 2.0)) for e in rounds],
        [e._replace(losses=e.losses * 1e38) for e in rounds],
    ]


def _with_loss(evidence: Evidence, loss: float, replicas: list[int]) -> Evidence:
    losses = evidence.losses.copy()
    losses[replicas] = loss
    return evidence._replace(losses=losses)


# -- rules ----------------------------------------------------------------------------------------------------------


def _check_state(state: Any, num_knobs: int) -> None:
    is_named = isinstance(state, tuple) and hasattr(state, "_fields")
    _require(is_named, f"the state must be a NamedTuple, but got {type(state).__name__}")
    for name, value in state._asdict().items():
        is_array = isinstance(value, np.ndarray) and value.dtype == np.float64
        fits = is_array and value.ndim > 0 and value.shape[0] in (1, num_knobs)
        rows = f"1 or {num_knobs} rows"
        _require(fits, "state field %r must be a float64 array of %s, but got %r", name, rows, value)
        _require(bool(np.isfinite(value).all()), "state field %r must stay finite, but got %r", name, value)


def _check_decision(decision: Any, num_knobs: int) -> None:
    _require(isinstance(decision, Decision), f"update must return a Decision, but got {type(decision).__name__}")
    factors = decision.factors
    shape = np.shape(factors)
    _require(shape == (num_knobs,), f"factors must have shape ({num_knobs},), but got {shape}")
    healthy = bool(np.isfinite(factors).all() and (factors > 0).all())
    _require(healthy, "factors must be positive and finite, but got %r", factors)
    for name, values in decision.info.items():
        plain = type(values) is tuple and all(type(value) is float for value in values)
        _require(plain, "info[%r] must be a tuple of floats, but got %r", name, values)


def _check_walk(controller: Controller, rounds: list[Evidence]) -> None:
    """Every state and every decision is well formed, and no update changes what it was given."""
    num_knobs = len(rounds[0].multipliers)
    state = controller.init(num_knobs)
    for evidence in rounds:
        given = _arrays(evidence), _packed(state)
        result = controller.update(state, evidence)
        _require(
            isinstance(result, tuple) and len(result) == 2,
            f"update must return (state, decision), but got {type(result).__name__}",
        )
        _require(_same(given[0], _arrays(evidence)), "update must not change the evidence it is given")
        _require(_same(given[1], _packed(state)), "update must not change the state it is given")
        state, decision = result
        _check_decision(decision, num_knobs)
        _check_state(state, num_knobs)


def _check_pure(controller: Controller, rounds: list[Evidence]) -> None:
    """What a controller has been asked before must not matter, only the state it is given."""
    once, again = _walk(controller, rounds), _walk(controller, rounds)
    for (state, decision), (other_state, other) in zip(once, again, strict=True):
        same = (
            _same(_packed(state), _packed(other_state))
            and _same([decision.factors], [other.factors])
            and repr(decision.info) == repr(other.info)
        )
        _require(same, "update must be pure: the same state and evidence gave two different results")


def _check_saving(controller: Controller, rounds: list[Evidence]) -> None:
    state = controller.init(len(rounds[0].multipliers))
    for evidence in rounds:
        packed = pack_state(state)
        again = unpack_state(packed, controller.init(len(evidence.multipliers)))
        _require(pack_state(again) == packed, "the state must survive pack_state and unpack_state, but got %r", again)
        state, decision = controller.update(state, evidence)
        _, resumed = controller.update(again, evidence)
        _require(
            _same([decision.factors], [resumed.factors]),
            "a saved state must lead to the same factors, but got %s instead of %s",
            resumed.factors,
            decision.factors,
        )


def _check_order_of_replicas(controller: Controller, rounds: list[Evidence]) -> None:
    order = np.roll(np.arange(len(rounds[0].losses)), 1)
    turned = [e._replace(losses=e.losses[order], multipliers=e.multipliers[:, order]) for e in rounds]
    _require_alike(
        _walk(controller, rounds), _walk(controller, turned), "permuting the replicas must change nothing, but"
    )


def _check_order_of_knobs(controller: Controller, rounds: list[Evidence]) -> None:
    order = np.roll(np.arange(len(rounds[0].multipliers)), 1)
    turned = [
        e._replace(
            multipliers=e.multipliers[order],
            slopes=None if e.slopes is None else (e.slopes[0][order], e.slopes[1][order]),
            scales=None if e.scales is None else e.scales[order],
        )
        for e in rounds
    ]
    rule = "permuting the knobs must permute the decision, but"
    _require_alike(_walk(controller, rounds), _walk(controller, turned), rule, order)


def _check_constant(controller: Controller, rounds: list[Evidence]) -> None:
    shifted = [
        e._replace(losses=e.losses + 4.0, start=None if e.start is None else (e.start[0] + 4.0, e.start[1]))
        for e in rounds
    ]
    rule = "adding a constant to all losses must change nothing, but"
    _require_alike(_walk(controller, rounds), _walk(controller, shifted), rule)


def _check_silence(controller: Controller, rounds: list[Evidence]) -> None:
    """A round without a finite loss moves nothing, at the start as well as after rounds that moved a lot."""
    num_knobs = len(rounds[0].multipliers)
    nothing = np.full(num_knobs, np.nan)
    states = [controller.init(num_knobs), *(state for state, _ in _walk(controller, rounds))]
    for state in states:
        for bad in (np.nan, np.inf):
            for slopes in (None, (nothing, nothing)):
                losses = np.full_like(rounds[0].losses, bad)
                _, decision = controller.update(state, Evidence(losses, rounds[0].multipliers, slopes))
                still = bool((decision.factors == 1).all())
                _require(still, "a round without a finite loss must move nothing, but got factors %s", decision.factors)


# -- tools ----------------------------------------------------------------------------------------------------------


def _walk(controller: Controller, rounds: list[Evidence]) -> list[tuple[Any, Decision]]:
    state = controller.init(len(rounds[0].multipliers))
    steps = []
    for evidence in rounds:
        state, decision = controller.update(state, evidence)
        steps.append((state, decision))
    return steps


def _require(ok: bool, message: str, *values: Any) -> None:
    """``values`` are put into the message only where it is needed: to print arrays took most of the time."""
    if not ok:
        raise AssertionError(message % values if values else message)


def _require_alike(
    one: list[tuple[Any, Decision]], other: list[tuple[Any, Decision]], rule: str, order: Any = slice(None)
) -> None:
    for (_, a), (_, b) in zip(one, other, strict=True):
        factors = a.factors[order]
        _require(_close([factors], [b.factors]), "%s factors %s became %s", rule, factors, b.factors)


def _arrays(evidence: Evidence) -> list[FloatArray]:
    return [a.copy() for a in (evidence.losses, evidence.multipliers, *(evidence.slopes or ()))]


def _packed(state: Any) -> list[FloatArray]:
    return [np.array(value) for value in state]


def _same(one: list[FloatArray], other: list[FloatArray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def _close(one: list[FloatArray], other: list[FloatArray]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(one, other, strict=True)
    )
