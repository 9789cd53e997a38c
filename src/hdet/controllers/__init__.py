"""Controllers: what the replicas' losses say about where the base value should go."""

from hdet.controllers.base import Controller, Decision, Evidence
from hdet.controllers.evidence import EvidenceController
from hdet.controllers.hold import Hold
from hdet.controllers.joint import JointController
from hdet.controllers.level import LevelController
from hdet.controllers.paper import PaperController
from hdet.controllers.valley import ValleyController

__all__ = [
    "Controller", "Decision", "Evidence", "EvidenceController", "Hold", "JointController", "LevelController",
    "PaperController", "ValleyController",
]  # fmt: skip
