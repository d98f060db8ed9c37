"""Signatures of webhook requests: codeQ's own and those of Standard Webhooks.

The timestamp is that of the attempt, so a receiver that rejects timestamps older than five minutes also accepts a
retry an hour later. During a secret rotation a request is signed with both secrets. The Standard Webhooks header holds
several signatures. codeQ's header holds one, so the signature with the former secret has its own header.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"


def headers(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the signature headers for a body. `secrets` are the valid secrets, newest first."""
    signed = {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign_standard(secret, message_id, timestamp, body) for secret in secrets),
        "X-CodeQ-Timestamp": str(timestamp),
        "X-CodeQ-Signature": sign_codeq(secrets[0], timestamp, body),
    }
    if len(secrets) > 1:
        signed["X-CodeQ-Signature-Previous"] = sign_codeq(secrets[1], timestamp, body)
    return signed


def sign_codeq(secret: str, timestamp: int, body: bytes) -> str:
    """Return codeQ's signature: hex HMAC-SHA256 of `timestamp.body`.

    The key is the secret as printed, with its `whsec_` prefix.
    """
    return hmac.digest(secret.encode(), b"%d." % timestamp + body, "sha256").hex()


def sign_standard(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the Standard Webhooks signature, `v1,` and a base64 HMAC-SHA256.

    It signs `id.timestamp.body` with the decoded secret.
    """
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    return "v1," + base64.b64encode(digest).decode()
