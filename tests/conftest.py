"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about a shared machine than about the code.
settings.register_profile("hdet", deadline=None)
settings.load_profile("hdet")
