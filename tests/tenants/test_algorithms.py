"""Accepted signatures, and every known way to forge one."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm

from core.errors import Unauthenticated
from tenants.auth import jwks
from tenants.auth.verifier import Verifier
from tests.tenants.minting import Signer, assemble, b64, claims

pytestmark = [
    pytest.mark.usefixtures("acme"),
    pytest.mark.spec("AUT-1", "Only a valid RS256, ES256 or EdDSA signature of a known key is accepted"),
]

Signers = dict[str, Signer]


def assert_refused(verifier: Verifier, token: str) -> None:
    with pytest.raises(Unauthenticated):
        verifier.verify(token)


def hs256(header: dict[str, Any], secret: bytes) -> str:
    unsigned = assemble(header, claims(), b"").removesuffix(".")
    return f"{unsigned}.{b64(hmac.digest(secret, unsigned.encode(), hashlib.sha256))}"


def test_accepted_algorithms_are_fixed() -> None:
    assert jwks.ALGORITHMS == ("RS256", "ES256", "EdDSA")


@pytest.mark.parametrize("algorithm", jwks.ALGORITHMS)
def test_valid_signature_is_accepted(algorithm: str, signers: Signers, fresh_verifier: Verifier) -> None:
    assert fresh_verifier.verify(signers[algorithm].token(sub="me")).subject == "me"


@pytest.mark.parametrize("algorithm", jwks.ALGORITHMS)
def test_changed_claim_is_refused(algorithm: str, signers: Signers, fresh_verifier: Verifier) -> None:
    header, _, signature = signers[algorithm].token().split(".")
    assert_refused(fresh_verifier, f"{header}.{b64(json.dumps(claims(tenantId='other')).encode())}.{signature}")


@pytest.mark.parametrize("algorithm", jwks.ALGORITHMS)
def test_changed_signature_is_refused(algorithm: str, signers: Signers, fresh_verifier: Verifier) -> None:
    token = signers[algorithm].token()
    unsigned, signature = token.rsplit(".", 1)
    middle = len(signature) // 2
    flipped = "A" if signature[middle] != "A" else "B"
    assert_refused(fresh_verifier, f"{unsigned}.{signature[:middle]}{flipped}{signature[middle + 1 :]}")


@pytest.mark.parametrize("name", ["none", "None", "nOnE", "NONE", "", "HS256", "PS256", "ES384", "RS512", "ES256K"])
@pytest.mark.parametrize("signature", [b"", b"x" * 64], ids=["unsigned", "some-bytes"])
def test_other_algorithm_is_refused(name: str, signature: bytes, signer: Signer, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, assemble({"alg": name, "typ": "JWT", "kid": signer.kid}, claims(), signature))


@pytest.mark.parametrize("strip", ["signature", "dot", "payload", "header"])
def test_token_with_a_missing_part_is_refused(strip: str, signer: Signer, fresh_verifier: Verifier) -> None:
    header, payload, signature = signer.token().split(".")
    assert_refused(
        fresh_verifier,
        {
            "signature": f"{header}.{payload}.",
            "dot": f"{header}.{payload}",
            "payload": f"{header}..{signature}",
            "header": f".{payload}.{signature}",
        }[strip],
    )


PUBLIC_FORMS: dict[str, Callable[[Any, Signer], bytes]] = {
    "pem": lambda key, _: key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    "pem-stripped": lambda key, _: key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).strip(),
    "der": lambda key, _: key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    "jwk": lambda _, signer: json.dumps(signer.jwk).encode(),
    "jwk-compact": lambda _, signer: json.dumps(signer.jwk, separators=(",", ":")).encode(),
    "empty": lambda *_: b"",
}


@pytest.mark.parametrize("form", PUBLIC_FORMS)
@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_public_key_is_not_accepted_as_hmac_secret(
    form: str, algorithm: str, signers: Signers, fresh_verifier: Verifier
) -> None:
    signer = signers[algorithm]
    secret = PUBLIC_FORMS[form](signer.private.public_key(), signer)
    assert_refused(fresh_verifier, hs256({"alg": "HS256", "kid": signer.kid}, secret))


def test_pkcs1_public_key_is_not_accepted_as_hmac_secret(signers: Signers, fresh_verifier: Verifier) -> None:
    public = signers["RS256"].private.public_key()
    for encoding in (Encoding.PEM, Encoding.DER):
        secret = public.public_bytes(encoding, PublicFormat.PKCS1)
        assert_refused(fresh_verifier, hs256({"alg": "HS256", "kid": "key-RS256"}, secret))


@pytest.mark.parametrize("claimed", jwks.ALGORITHMS)
@pytest.mark.parametrize("real", jwks.ALGORITHMS)
def test_key_verifies_its_own_algorithm_only(
    claimed: str, real: str, signers: Signers, fresh_verifier: Verifier
) -> None:
    token = signers[real].sign_raw({"alg": claimed, "kid": signers[real].kid}, claims())
    if claimed == real:
        assert fresh_verifier.verify(token).subject == "someone"
    else:
        assert_refused(fresh_verifier, token)


def test_pss_signature_is_refused(signers: Signers, fresh_verifier: Verifier) -> None:
    private: rsa.RSAPrivateKey = signers["RS256"].private
    for name in ("PS256", "RS256"):
        unsigned = assemble({"alg": name, "kid": "key-RS256"}, claims(), b"").removesuffix(".")
        signature = private.sign(
            unsigned.encode(), padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH), SHA256()
        )
        assert_refused(fresh_verifier, f"{unsigned}.{b64(signature)}")


def test_other_key_with_a_known_kid_is_refused(signers: Signers, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, Signer("ES256", signers["ES256"].kid).token())


@pytest.mark.parametrize("where", ["jwk", "jku", "x5u", "x5c"])
def test_key_in_the_token_header_is_not_used(where: str, signer: Signer, fresh_verifier: Verifier) -> None:
    own = Signer("ES256", "key-ES256")
    key_reference = {
        "jwk": own.jwk,
        "jku": "http://127.0.0.1:9/jwks",
        "x5u": "http://127.0.0.1:9/cert",
        "x5c": ["MIIB"],
    }[where]
    assert_refused(fresh_verifier, own.sign_raw({"alg": "ES256", "kid": signer.kid, where: key_reference}, claims()))


@pytest.mark.parametrize(
    "header",
    [
        {"crit": ["b64"], "b64": False},
        {"crit": ["exp"]},
        {"crit": []},
        {"crit": None},
        {"alg": ["ES256"]},
        {"alg": None},
        {"alg": 1},
        {"kid": 7},
        {"kid": ["key-ES256"]},
        {"kid": {"$ne": ""}},
        {"kid": "../../etc/passwd"},
        {"kid": "key-es256"},
        {"kid": ""},
        {"kid": "\x00"},
    ],
    ids=str,
)
def test_invalid_header_field_is_refused(header: dict[str, Any], signer: Signer, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, signer.sign_raw({"alg": "ES256", "kid": signer.kid, **header}, claims()))


def test_token_without_kid_uses_the_only_key_of_its_algorithm(signer: Signer, fresh_verifier: Verifier) -> None:
    assert fresh_verifier.verify(signer.sign_raw({"alg": "ES256"}, claims())).subject == "someone"


def test_token_without_kid_is_refused_if_two_keys_have_its_algorithm(
    issuer: Any, signer: Signer, fresh_verifier: Verifier
) -> None:
    issuer.keys.append(Signer("ES256", "another").jwk)
    assert_refused(fresh_verifier, signer.sign_raw({"alg": "ES256"}, claims()))


@pytest.mark.parametrize(
    "payload",
    [
        b"[]",
        b"null",
        b"7",
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"a":' * 4000 + b"1" + b"}" * 4000,
        b'{"exp":NaN}',
        b'{"iss":"https://issuer.example","exp":1e400}',
        b'{"iss":"https://issuer.example","exp":' + b"9" * 5000 + b"}",
        b'{"iss":["https://issuer.example"]}',
        b'{"iss":null}',
    ],
    ids=lambda text: repr(text[:24]),
)
def test_signed_payload_without_claims_is_refused(payload: bytes, signer: Signer, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, signer.sign_raw({"alg": "ES256", "kid": signer.kid}, payload))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"null", b"\xff", b"[" * 5000, b'{"x":' * 4000 + b"1" + b"}" * 4000, b'{"alg":"ES256","alg":"none"}'],
    ids=lambda text: repr(text[:24]),
)
def test_malformed_header_is_refused(header: bytes, signer: Signer, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, signer.sign_raw(header, claims()))


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        "a.b.c.d.e",
        "é.é.é",
        "\x00.\x00.\x00",
        "x" * 20_000,
        "eyJ9.eyJ9.eyJ9",
        "\udcff" * 3,
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_malformed_token_is_refused(token: str, fresh_verifier: Verifier) -> None:
    assert_refused(fresh_verifier, token)


@pytest.mark.parametrize("junk", ["!", "\n", " ", "=", "==", "+", "/", "%"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_token_has_one_spelling(junk: str, part: int, signer: Signer, fresh_verifier: Verifier) -> None:
    """A second spelling of a token would have its own cache entry and rate limit."""
    parts = signer.token().split(".")
    parts[part] += junk
    assert_refused(fresh_verifier, ".".join(parts))


def test_unusable_keys_are_left_out(signers: Signers) -> None:
    weak = rsa.generate_private_key(65537, 1024)
    short = Signer("RS256", "short")
    short.private = weak
    usable = signers["RS256"].jwk
    unusable: list[object] = [
        short.jwk,
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        {**usable, "kid": "enc", "use": "enc"},
        {**usable, "kid": "ps", "alg": "PS256"},
        {**usable, "kid": "hs", "alg": "HS256"},
        {**signers["ES256"].jwk, "kid": "384", "crv": "P-384"},
        {**signers["ES256"].jwk, "kid": "off-curve", "y": signers["ES256"].jwk["x"]},
        {**usable, "kid": 7},
        {"kty": "RSA", "kid": "bare"},
        {"kty": ["RSA"], "kid": "list"},
        {"kty": "RSA", "n": 1, "e": 2, "kid": "numbers"},
        "RSA",
        None,
    ]
    assert set(jwks.parse_keys({"keys": [*unusable, usable]})) == {"key-RS256"}


@pytest.mark.parametrize("document", [None, [], "keys", 1, {}, {"keys": None}, {"keys": {}}, {"keys": []}], ids=str)
def test_malformed_jwks_has_no_keys(document: object) -> None:
    assert jwks.parse_keys(document) == {}


def test_published_private_key_is_read_as_a_public_key(signer: Signer) -> None:
    published = {**ECAlgorithm.to_jwk(signer.private, as_dict=True), "kid": "oops"}
    assert "d" in published
    assert not hasattr(jwks.parse_keys({"keys": [published]})["oops"].material, "private_numbers")
