"""HTTP client that claims tasks for a worker and can end a waiting claim early."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from codeq_client.client import Client


class PollClient(Client):
    """A client for the claims of one thread. It never sleeps: retries are up to the caller."""

    def __init__(self, base: str, token: str | Callable[[], str]) -> None:
        super().__init__(base, token, max_tries=1)
        self._extensions = {"trace": self._on_trace_event}
        self._socket: socket.socket | None = None
        self._is_stopped = False

    def stop_waiting(self) -> None:
        """End the waiting request and every later one. Safe to call from a signal handler.

        Close only the sending direction of the connection: the service then claims no more tasks for this request, and
        tasks that it has already claimed still arrive.
        """
        self._is_stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown: it drops the TLS layer, and later reads would return ciphertext.
                socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def _on_trace_event(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
        elif event.endswith("receive_response_headers.started") and self._is_stopped:
            self.stop_waiting()  # the first call may have come before the connection was open
