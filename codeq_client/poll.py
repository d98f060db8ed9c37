"""The one request of a worker that waits, and its end before its time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from codeq_client.client import Client


class PollClient(Client):
    """For one thread that claims. What does not get through is the caller's to send again: nothing sleeps in here."""

    def __init__(self, base: str, token: str | Callable[[], str]) -> None:
        super().__init__(base, token, tries=1)
        self._extensions = {"trace": self._heed}
        self._socket: socket.socket | None = None
        self._is_over = False

    def hang_up(self) -> None:
        """End the request that waits, and any that begins from now on; a signal's handler may say so.

        Our direction of the connection is closed, and not the other: a task that is on its way already still comes,
        and the service takes no other for somebody who has hung up.
        """
        self._is_over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Of the connection itself: an SSLSocket's own `shutdown` would read on without decrypting.
                socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def _heed(self, step: str, about: dict[str, Any]) -> None:
        if step.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = about["return_value"].get_extra_info("socket")
        elif step.endswith("receive_response_headers.started") and self._is_over:
            self.hang_up()  # it was said before there was anything to hang up
