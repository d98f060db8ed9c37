"""A webhook receiver that uses only Python's standard library and verifies signatures.

export SECRET=$(python manage.py secret --tenant demo)
python examples/receiver.py 9000
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_AGE_SECONDS = 300  # a recorded request cannot be replayed by an attacker after this time
MAX_BYTES = 2**20
seen: set[str] = set()  # in a real service: rows, inserted in the transaction that uses the result


def is_genuine(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> bool:
    """Return whether codeQ sent this body recently.

    While a secret is being replaced there are several signatures.
    """
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(now - int(timestamp)) > MAX_AGE_SECONDS:
        return False
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    expected = b"v1," + base64.b64encode(digest)
    signatures = headers.get("webhook-signature", "").encode().split()
    return any(hmac.compare_digest(expected, signature) for signature in signatures)


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BYTES:
            self.respond(413)
            return
        body = self.rfile.read(int(length))
        headers = {name.lower(): value for name, value in self.headers.items()}  # a proxy may change the case
        if not is_genuine(headers, body, os.environ["SECRET"], time.time()):
            print("forged, or signed with another secret", flush=True)
            self.respond(401)
            return
        # Delivery is at least once: the same request can arrive again with the same id.
        if headers["webhook-id"] not in seen:
            seen.add(headers["webhook-id"])
            callback = json.loads(body)
            print(
                "genuine:", callback["taskId"], callback["status"], callback["result"] or callback["error"], flush=True
            )
        self.respond(204)

    def respond(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Suppress the access log: `do_POST` prints each delivery."""


if __name__ == "__main__":
    if len(sys.argv) != 2 or "SECRET" not in os.environ:
        sys.exit(__doc__)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
