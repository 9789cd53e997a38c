"""Controllers: what a round's evidence says about where the base value should go.

Those that compare replicas, the paper's among them, are in :mod:`hdet.ensemble.controllers`.
"""

from hdet.controllers.base import Controller, Decision, Evidence
from hdet.controllers.evidence import EvidenceController
from hdet.controllers.hold import Hold
from hdet.controllers.level import LevelController

__all__ = ["Controller", "Decision", "Evidence", "EvidenceController", "Hold", "LevelController"]
