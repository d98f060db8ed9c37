"""The public keys of this installation's tokens: `/.well-known/jwks.json`."""

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
    """The public keys of the tokens that this installation issues, for `/.well-known/jwks.json`."""
    return JsonResponse(installation_keys.document(), content_type="application/jwk-set+json")


class KeySet(msgspec.Struct):
    """RFC 7517: public keys."""

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
        """RFC 7517."""
        return await threadpool.run_db(jwks, self.request)
