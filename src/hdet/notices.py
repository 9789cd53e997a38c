"""What a run should say that is no warning: through the ``hdet`` logger, on one rank, visible unless told otherwise."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger("hdet")


def is_first_rank() -> bool:
    """Whether this rank says what is the same on all of them."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def tell(message: str) -> None:
    """Log it on the first rank; to standard error where the program has no logging of its own."""
    if not is_first_rank():
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logger.hasHandlers():
        logger.info(message)
        return
    # For this message alone: one that stayed would say everything twice once the program sets up its own.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hdet: %(message)s"))
    logger.addHandler(handler)
    try:
        logger.info(message)
    finally:
        logger.removeHandler(handler)
