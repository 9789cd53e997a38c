"""Where the weights are: moves between places."""

from __future__ import annotations

from hdet.ensemble.averaging import WeightsState, Where


def test_a_round_starts_at_the_mean_or_away_from_it() -> None:
    place = WeightsState(0)
    assert place.is_mean(0, placed=False)
    assert not place.is_mean(0, placed=True)
    place.end_round(4, shared=True, last=False)
    assert [place.is_mean(step, placed=False) for step in (4, 5)] == [True, False]
    assert not place.is_mean(4, placed=True)
    place.end_round(8, shared=False, last=False)  # elastic replicas are drawn towards it only
    assert not place.is_mean(8, placed=False)
    place.end_round(12, shared=True, last=True)
    assert place.is_mean(12, placed=True)
    assert place.left_at_mean


def test_a_mean_in_mid_round_lasts_until_the_round_ends() -> None:
    place = WeightsState(0)
    place.meet(2)
    assert place.is_mean(2, placed=True)
    assert place.left_at_mean
    place.end_round(4, shared=True, last=False)
    assert not place.left_at_mean


def test_what_is_set_aside_comes_back() -> None:
    place = WeightsState(0)
    place.end_round(4, shared=True, last=False)
    with place.set_aside():
        place.meet(6)
        assert place.is_mean(6, placed=True)
        assert not place.left_at_mean  # a run that continues from here trains on from its own places
        assert place.is_set_aside
    assert (place.mean_step, place.where, place.is_set_aside) == (4, Where.OWN, False)


def test_a_resumed_run_goes_on_from_the_mean() -> None:
    place = WeightsState(0)
    place.resume(9, at_mean=True)
    assert place.is_mean(9, placed=True)
