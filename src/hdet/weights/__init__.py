"""Copies and means of the weights: what is averaged, the anchor, snapshots. Private: it may change in any release."""

__all__: list[str] = []
