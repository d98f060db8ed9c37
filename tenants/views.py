"""What anybody may read about this installation's tokens."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

from tenants import keys


@require_safe
@cache_control(public=True, max_age=60)
def jwks(request: HttpRequest) -> JsonResponse:
    """The public keys of the tokens that this installation issues, for `/.well-known/jwks.json`."""
    return JsonResponse(keys.document(), content_type="application/jwk-set+json")
