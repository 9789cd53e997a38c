"""Decisions from numbers alone: no tensors, no processes, no time. Private: it may change in any release."""

__all__: list[str] = []
