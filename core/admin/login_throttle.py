"""The console's login: whoever guesses passwords is slowed down, by name, by address, and by both together.

An attempt is counted before its password is looked at. So a thousand at once get no further than one after the other,
and what is refused costs no hashing.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from typing import Any

from django.contrib import admin
from django.core.cache import cache
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from redis.exceptions import RedisError
from unfold.forms import AuthenticationForm

log = logging.getLogger("codeq.login")

WINDOW_SECONDS = 300
# Attempts in a window. For one name from one address: what somebody mistypes. From one address: an office behind one.
# For one name from everywhere: a botnet is stopped, and shutting a person out takes that many guesses every window.
MOST = {"both": 5, "address": 50, "name": 100}
# Counts in this process while Redis is away: neither does the login open, nor are operators shut out.
_local = LocMemCache("codeq-logins", {"OPTIONS": {"MAX_ENTRIES": 10_000}})
_now = time.time


def attempt(name: str, address: str) -> int:
    """Count an attempt; how many seconds to wait if there were too many, or 0."""
    keys, left = _keys(name, address)
    tried = _change(keys, 1)
    return left if any(tried[what] > most for what, most in MOST.items()) else 0


def succeed(name: str, address: str) -> None:
    """The last attempt was right: it was no guess."""
    keys, _ = _keys(name, address)
    _change(keys, -1)


def _keys(name: str, address: str) -> tuple[dict[str, str], int]:
    """Of the counters in this window, and when it ends. Hashed: neither length nor letters are the client's."""
    window, past = divmod(_now(), WINDOW_SECONDS)
    counted = {"both": (name, address), "address": (address,), "name": (name,)}
    return {
        what: f"login:{what}:{hashlib.sha256(repr(of).encode()).hexdigest()}:{window:.0f}"
        for what, of in counted.items()
    }, math.ceil(WINDOW_SECONDS - past)


def _change(keys: dict[str, str], by: int) -> dict[str, int]:
    try:
        return {what: _count(cache, key, by) for what, key in keys.items()}
    except (RedisError, OSError) as error:
        log.warning("logins are counted in this process alone: %s", type(error).__name__)
        return {what: _count(_local, key, by) for what, key in keys.items()}


def _count(counters: BaseCache, key: str, by: int) -> int:
    counters.add(key, 0, 2 * WINDOW_SECONDS)
    return counters.incr(key, by)


class LoginForm(AuthenticationForm):
    """The theme's, which counts."""

    wait_seconds = 0

    def clean(self) -> dict[str, Any]:
        name, address = self.cleaned_data.get("username"), self.request.META.get("REMOTE_ADDR", "")
        is_attempt = bool(name and self.cleaned_data.get("password"))
        self.wait_seconds = attempt(name, address) if is_attempt else 0
        if self.wait_seconds:
            log.warning("a login from %s is refused for %d s: too many attempts", address, self.wait_seconds)
            raise ValidationError(f"Too many attempts. Try again in {self.wait_seconds} s.", code="throttled")
        cleaned: dict[str, Any] = super().clean()
        if is_attempt:
            succeed(name, address)
        return cleaned


def login(request: HttpRequest) -> HttpResponse:
    """The admin's own page; 429 with Retry-After where it says so."""
    response = admin.site.login(request)
    form = (getattr(response, "context_data", None) or {}).get("form")
    if isinstance(form, LoginForm) and form.wait_seconds:
        response.status_code = 429
        response["Retry-After"] = str(form.wait_seconds)
    return response
