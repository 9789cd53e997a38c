"""Ctrl-C and SIGTERM as a request: finish the round, save, stop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping at the end of this round, with a checkpoint; interrupt again to stop at once\n"


class Event(Protocol):
    """A flag that processes share."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


class Stop:
    """True once a stop has been asked for.

    Args:
        event: how the process in charge passes a request on to its replicas.
    """

    def __init__(self, event: Event | None = None) -> None:
        self.event = event
        self.num_signals = 0

    def __bool__(self) -> bool:
        return self.num_signals > 0 or (self.event is not None and self.event.is_set())

    @contextlib.contextmanager
    def on_signals(self, *, in_charge: bool) -> Iterator[None]:
        """Turn signals into requests while the block lasts.

        Args:
            in_charge: say so on the terminal, pass the request on, and take a second signal literally. A process that
                others steer may get one Ctrl-C several times, and is ended by those it belongs to.
        """

        def ask(number: int, frame: Any) -> None:
            self.num_signals += 1
            if not in_charge:
                return  # and not the event: its lock may be held by the very code that is interrupted here
            if self.num_signals > 1:
                raise KeyboardInterrupt
            if self.event is not None:
                self.event.set()
            os.write(2, NOTICE)  # a handler may interrupt a print

        before = {number: signal.signal(number, ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
