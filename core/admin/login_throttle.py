"""Limit login attempts in the console by user name, by client address, and by both.

An attempt is counted before its password is checked. So concurrent attempts gain nothing over sequential ones, and a
refused attempt costs no password hashing.
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
# Maximum attempts in a window, by scope. `both` (one name from one address) allows an operator's typing mistakes, and
# `address` an office behind one address. `name` stops a botnet; an attacker who wants to lock an operator out has to
# make this many attempts in every window.
MAX_ATTEMPTS = {"both": 5, "address": 50, "name": 100}
# The counters of this process, used while Redis is unavailable: attempts stay limited, and operators can log in.
_local_counters = LocMemCache("codeq-logins", {"OPTIONS": {"MAX_ENTRIES": 10_000}})
_now = time.time


def count_attempt(name: str, address: str) -> int:
    """Count an attempt. Return the seconds to wait if there were too many, else 0."""
    keys, seconds_left = _keys(name, address)
    counts = _add_to_counters(keys, 1)
    return seconds_left if any(counts[scope] > limit for scope, limit in MAX_ATTEMPTS.items()) else 0


def uncount_attempt(name: str, address: str) -> None:
    """Take back the count of an attempt whose password was right."""
    keys, _ = _keys(name, address)
    _add_to_counters(keys, -1)


def _keys(name: str, address: str) -> tuple[dict[str, str], int]:
    """Return the keys of the counters of this window by scope, and the seconds until it ends.

    Names and addresses are hashed, so that a client decides neither the length nor the characters of a key.
    """
    window, elapsed = divmod(_now(), WINDOW_SECONDS)
    values = {"both": (name, address), "address": (address,), "name": (name,)}
    keys = {
        scope: f"login:{scope}:{hashlib.sha256(repr(value).encode()).hexdigest()}:{window:.0f}"
        for scope, value in values.items()
    }
    return keys, math.ceil(WINDOW_SECONDS - elapsed)


def _add_to_counters(keys: dict[str, str], by: int) -> dict[str, int]:
    try:
        return {scope: _add(cache, key, by) for scope, key in keys.items()}
    except (RedisError, OSError) as error:
        log.warning(
            "Redis is unavailable, so login attempts are counted by this process only: %s", type(error).__name__
        )
        return {scope: _add(_local_counters, key, by) for scope, key in keys.items()}


def _add(counters: BaseCache, key: str, by: int) -> int:
    counters.add(key, 0, 2 * WINDOW_SECONDS)
    return counters.incr(key, by)


class LoginForm(AuthenticationForm):
    """The theme's login form with a limit on attempts."""

    wait_seconds = 0

    def clean(self) -> dict[str, Any]:
        name, address = self.cleaned_data.get("username"), self.request.META.get("REMOTE_ADDR", "")
        is_attempt = bool(name and self.cleaned_data.get("password"))
        self.wait_seconds = count_attempt(name, address) if is_attempt else 0
        if self.wait_seconds:
            log.warning("too many login attempts from %s: refused for %d s", address, self.wait_seconds)
            raise ValidationError(f"Too many attempts. Try again in {self.wait_seconds} s.", code="throttled")
        cleaned: dict[str, Any] = super().clean()
        if is_attempt:
            uncount_attempt(name, address)
        return cleaned


def login(request: HttpRequest) -> HttpResponse:
    """The admin's login page, with 429 and Retry-After if there were too many attempts."""
    response = admin.site.login(request)
    form = (getattr(response, "context_data", None) or {}).get("form")
    if isinstance(form, LoginForm) and form.wait_seconds:
        response.status_code = 429
        response["Retry-After"] = str(form.wait_seconds)
    return response
