"""Key pairs, and valid and forged tokens."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def assemble(header: dict[str, Any] | bytes, payload: dict[str, Any] | bytes, signature: bytes) -> str:
    """Return a compact JWS of exactly these parts."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, payload)]
    return ".".join([*map(b64, parts), b64(signature)])


def claims(**changes: Any) -> dict[str, Any]:
    """Return a producer's claims for the tenant `acme`; `name=None` removes a claim."""
    now = int(time.time())
    base = {
        "iss": ISSUER,
        "sub": "someone",
        "aud": "codeq-producer",
        "tenantId": "acme",
        "iat": now,
        "exp": now + 600,
    }
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


@dataclass
class Signer:
    """A named key pair that signs tokens."""

    algorithm: str
    kid: str
    private: Any = field(init=False)

    def __post_init__(self) -> None:
        self.private = {
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }[self.algorithm]()

    @property
    def jwk(self) -> dict[str, Any]:
        kind: Any = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}[self.algorithm]
        public = kind.to_jwk(self.private.public_key(), as_dict=True)
        public.pop("key_ops", None)
        return {**public, "kid": self.kid, "use": "sig"}

    def sign(self, payload: dict[str, Any], **header: Any) -> str:
        algorithm = header.pop("alg", self.algorithm)
        return jwt.encode(payload, self.private, algorithm, headers={"kid": self.kid, **header})

    def token(self, **changes: Any) -> str:
        return self.sign(claims(**changes))

    def sign_raw(self, header: dict[str, Any] | bytes, payload: dict[str, Any] | bytes) -> str:
        """Return a token with a valid signature over parts that a library would refuse."""
        unsigned = assemble(header, payload, b"").removesuffix(".")
        kind = jwt.api_jws.PyJWS().get_algorithm_by_name(self.algorithm)
        return f"{unsigned}.{b64(kind.sign(unsigned.encode(), self.private))}"
