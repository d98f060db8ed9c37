"""What we send verifies: by the Standard Webhooks package, and as codeQ's clients do it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import os
import time
from pathlib import Path
from types import ModuleType

import pytest
from django.conf import settings
from standardwebhooks import Webhook, WebhookVerificationError

from webhooks import signing

BODIES = {
    "plain": b'{"status":"COMPLETED"}',
    "not ASCII": '{"ü":"€😀"}'.encode(),
    "a megabyte": json.dumps({"x": "y" * 2**20}).encode(),
}


def secret() -> str:
    return "whsec_" + base64.b64encode(os.urandom(32)).decode()


@pytest.mark.spec("WHK-4", "The official Standard Webhooks package verifies what we send; one flipped bit fails (W-3)")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_the_official_package_verifies(body: bytes) -> None:
    key, now = secret(), int(time.time())
    headers = signing.headers([key], "d-1", now, body)
    assert Webhook(key).verify(body, headers) == json.loads(body)

    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    with pytest.raises((WebhookVerificationError, UnicodeDecodeError)):
        Webhook(key).verify(bytes(changed), headers)
    for name in ("webhook-id", "webhook-timestamp"):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(body, headers | {name: str(now - 1)})


@pytest.mark.spec("WHK-4", "codeQ's own headers verify as its clients do it: hex HMAC-SHA256 of timestamp.body")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_codeqs_own_signature_verifies(body: bytes) -> None:
    key = secret()
    headers = signing.headers([key], "d-1", 1_790_000_000, body)
    stamp = headers["X-CodeQ-Timestamp"]
    expected = hmac.new(key.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    assert (stamp, headers["X-CodeQ-Signature"]) == ("1790000000", expected)


@pytest.mark.spec("WHK-4", "While a secret is replaced both verify, so a receiver changes over when it likes (W-5)")
def test_both_secrets_verify_while_one_replaces_the_other() -> None:
    new, former, body = secret(), secret(), b"{}"
    headers = signing.headers([new, former], "d-1", int(time.time()), body)
    for key in (new, former):
        Webhook(key).verify(body, headers)
    stamp = f"{headers['X-CodeQ-Timestamp']}.".encode()
    for key, name in ((new, "X-CodeQ-Signature"), (former, "X-CodeQ-Signature-Previous")):
        assert headers[name] == hmac.new(key.encode(), stamp + body, hashlib.sha256).hexdigest()
    with pytest.raises(WebhookVerificationError):
        Webhook(secret()).verify(body, headers)


def test_a_replay_is_refused_by_the_time_that_was_signed() -> None:
    key = secret()
    headers = signing.headers([key], "d-1", int(time.time()) - 360, b"{}")
    with pytest.raises(WebhookVerificationError, match="too old"):
        Webhook(key).verify(b"{}", headers)


@pytest.fixture(scope="module")
def receiver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("receiver", Path(settings.BASE_DIR) / "examples" / "receiver.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.spec("DOC-2", "The example receiver takes what is genuine, under either secret, and nothing else")
def test_the_example_receiver_tells_the_genuine_from_the_forged(receiver: ModuleType) -> None:
    new, former, body, now = secret(), secret(), b'{"status":"COMPLETED"}', 1_790_000_000
    headers = signing.headers([new, former], "d-1", now, body)
    assert receiver.is_genuine(headers, body, new, now + 299)
    assert receiver.is_genuine(headers, body, former, now)
    assert not receiver.is_genuine(headers, body, secret(), now)
    assert not receiver.is_genuine(headers, body + b" ", new, now)
    assert not receiver.is_genuine(headers, body, new, now + 301)
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        assert not receiver.is_genuine(headers | {name: "1\u00fc"}, body, new, now)
        assert not receiver.is_genuine({key: value for key, value in headers.items() if key != name}, body, new, now)
