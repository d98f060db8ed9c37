"""Signatures verify with the Standard Webhooks package and codeQ's documented scheme."""

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


def make_secret() -> str:
    return "whsec_" + base64.b64encode(os.urandom(32)).decode()


@pytest.mark.spec("WHK-4", "The official Standard Webhooks package accepts a signature and rejects one flipped bit")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_official_package_verifies(body: bytes) -> None:
    key, now = make_secret(), int(time.time())
    headers = signing.headers([key], "d-1", now, body)
    assert Webhook(key).verify(body, headers) == json.loads(body)

    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    with pytest.raises((WebhookVerificationError, UnicodeDecodeError)):
        Webhook(key).verify(bytes(changed), headers)
    for name in ("webhook-id", "webhook-timestamp"):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(body, headers | {name: str(now - 1)})


@pytest.mark.spec("WHK-4", "codeQ's own signature is the hex HMAC-SHA256 of timestamp.body")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_codeq_signature_verifies(body: bytes) -> None:
    key = make_secret()
    headers = signing.headers([key], "d-1", 1_790_000_000, body)
    stamp = headers["X-CodeQ-Timestamp"]
    expected = hmac.new(key.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    assert (stamp, headers["X-CodeQ-Signature"]) == ("1790000000", expected)


@pytest.mark.spec("WHK-4", "During a rotation both secrets verify, so that receivers can switch at any time")
def test_both_secrets_verify_during_a_rotation() -> None:
    new, former, body = make_secret(), make_secret(), b"{}"
    headers = signing.headers([new, former], "d-1", int(time.time()), body)
    for key in (new, former):
        Webhook(key).verify(body, headers)
    stamp = f"{headers['X-CodeQ-Timestamp']}.".encode()
    for key, name in ((new, "X-CodeQ-Signature"), (former, "X-CodeQ-Signature-Previous")):
        assert headers[name] == hmac.new(key.encode(), stamp + body, hashlib.sha256).hexdigest()
    with pytest.raises(WebhookVerificationError):
        Webhook(make_secret()).verify(body, headers)


def test_replayed_request_is_rejected_by_its_timestamp() -> None:
    key = make_secret()
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


@pytest.mark.spec("DOC-2", "The example receiver accepts genuine requests, with either secret, and nothing else")
def test_example_receiver_rejects_forged_requests(receiver: ModuleType) -> None:
    new, former, body, now = make_secret(), make_secret(), b'{"status":"COMPLETED"}', 1_790_000_000
    headers = signing.headers([new, former], "d-1", now, body)
    assert receiver.is_genuine(headers, body, new, now + 299)
    assert receiver.is_genuine(headers, body, former, now)
    assert not receiver.is_genuine(headers, body, make_secret(), now)
    assert not receiver.is_genuine(headers, body + b" ", new, now)
    assert not receiver.is_genuine(headers, body, new, now + 301)
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        assert not receiver.is_genuine(headers | {name: "1\u00fc"}, body, new, now)
        assert not receiver.is_genuine({key: value for key, value in headers.items() if key != name}, body, new, now)
