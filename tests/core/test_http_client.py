"""Addresses that the HTTP client refuses for an operator's URL.

tests/webhooks/test_http.py and tests/tenants/test_http_fetch.py have its other tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core import http_client
from core.url_check import AddressRefused, UrlTarget, check_operator_addresses


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "224.0.0.1", "::"])
@pytest.mark.parametrize("others", [[], ["10.0.0.1"]], ids=["alone", "among others"])
async def test_operators_url_reaches_no_metadata_service(address: str, others: Sequence[str]) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return [*others, address]

    with pytest.raises(AddressRefused):
        await http_client.request(
            "GET",
            UrlTarget("http", "issuer.internal", 80, "/"),
            {},
            check=check_operator_addresses,
            deadline_seconds=5,
            max_bytes=1,
            resolve=resolve,
        )
