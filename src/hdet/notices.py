"""What a run should say that is no warning: through the ``hdet`` logger, on one rank, visible unless told otherwise."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger("hdet")


def tell(message: str) -> None:
    """Log it on the first rank; to standard error where the program has no logging of its own."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hdet: %(message)s"))
        logger.addHandler(handler)
    logger.info(message)
