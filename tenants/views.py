"""The route `/.well-known/jwks.json`."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

from core import errors, threadpool
from core.http.api_view import ApiView
from core.http.operation import Operation
from tenants.auth import installation_keys


@require_safe
@cache_control(public=True, max_age=60)
def jwks(request: HttpRequest) -> JsonResponse:
    """Return the public keys that verify the tokens of this installation."""
    return JsonResponse(installation_keys.document(), content_type="application/jwk-set+json")


class KeySet(msgspec.Struct):
    """A JSON Web Key Set (RFC 7517)."""

    keys: list[dict[str, Any]]


class JwksView(ApiView):
    @Operation(
        "jwks",
        tag="Operations",
        summary="The public keys of this installation's tokens",
        is_open=True,
        answers={200: ("application/jwk-set+json", KeySet)},
        errors=(errors.Unavailable,),
    )
    async def get(self) -> HttpResponse:
        """Return a JSON Web Key Set (RFC 7517)."""
        return await threadpool.run_db(jwks, self.request)
