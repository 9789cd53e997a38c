"""Controllers that compare replicas: the paper's (Eq. 4 to 7), one for several knobs, and one for generations."""

from hdet.ensemble.controllers.joint import JointController
from hdet.ensemble.controllers.paper import PaperController
from hdet.ensemble.controllers.valley import ValleyController

__all__ = ["JointController", "PaperController", "ValleyController"]
