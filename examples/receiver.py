"""A receiver of webhooks with nothing but Python's standard library: it tells the genuine from the forged.

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

OLD_SECONDS = 300  # a request that was recorded is no use to anybody after this
MOST_BYTES = 2**20
seen: set[str] = set()  # where a row with the task belongs, in the transaction that uses the result


def is_genuine(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> bool:
    """Whether codeQ sent exactly this, lately. During a change of secrets there are several signatures."""
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(now - int(timestamp)) > OLD_SECONDS:
        return False
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    expected = b"v1," + base64.b64encode(digest)
    signatures = headers.get("webhook-signature", "").encode().split()
    return any(hmac.compare_digest(expected, each) for each in signatures)


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.answer(413)
            return
        body = self.rfile.read(int(length))
        headers = {name.lower(): value for name, value in self.headers.items()}  # a proxy may write them as it likes
        if not is_genuine(headers, body, os.environ["SECRET"], time.time()):
            print("forged, or signed with another secret", flush=True)
            self.answer(401)
            return
        # At least once means that it may come again, under the same id.
        if headers["webhook-id"] not in seen:
            seen.add(headers["webhook-id"])
            told = json.loads(body)
            print("genuine:", told["taskId"], told["status"], told["result"] or told["error"], flush=True)
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing: each delivery has said what it is."""


if __name__ == "__main__":
    if len(sys.argv) != 2 or "SECRET" not in os.environ:
        sys.exit(__doc__)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
