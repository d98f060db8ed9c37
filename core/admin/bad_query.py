"""Answer 400 for query values that PostgreSQL rejects, such as a null character."""

from __future__ import annotations

import logging

from django.core.exceptions import SuspiciousOperation
from django.db import DataError
from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin
from django.views.defaults import bad_request

log = logging.getLogger("codeq.console")


class BadQueryMiddleware(MiddlewareMixin):
    """Turn a database error that a query string caused into a 400.

    Django's lists pass the values of their query string to the database without a check, and would answer 500.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, DataError | OverflowError):
            return None
        log.warning("%s: the database rejected a query value: %s", request.path, type(exception).__name__)
        return bad_request(request, SuspiciousOperation())
