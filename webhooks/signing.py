"""Signatures of what we send: codeQ's own headers, and those of the Standard Webhooks specification.

The time is the attempt's, not the delivery's, so a retry an hour later still verifies within five minutes. While a
secret is being replaced both are in force: Standard Webhooks takes several signatures in one header; codeQ's takes
one, so the former secret's goes beside it.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"


def headers(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers for a body, signed with each secret in force, the newest first."""
    signed = {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(standard(secret, message_id, timestamp, body) for secret in secrets),
        "X-CodeQ-Timestamp": str(timestamp),
        "X-CodeQ-Signature": plain(secrets[0], timestamp, body),
    }
    if len(secrets) > 1:
        signed["X-CodeQ-Signature-Previous"] = plain(secrets[1], timestamp, body)
    return signed


def plain(secret: str, timestamp: int, body: bytes) -> str:
    """codeQ's: hex HMAC-SHA256 of `timestamp.body`. The key is the secret as its owner sees it, `whsec_` included."""
    return hmac.digest(secret.encode(), b"%d." % timestamp + body, "sha256").hex()


def standard(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Standard Webhooks': `v1,` and base64 HMAC-SHA256 of `id.timestamp.body`. The key is the decoded secret."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    return "v1," + base64.b64encode(digest).decode()
