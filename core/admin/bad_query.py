"""What a page was asked and the database has no answer to: a null character, a year beyond all calendars."""

from __future__ import annotations

import logging

from django.core.exceptions import SuspiciousOperation
from django.db import DataError
from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin
from django.views.defaults import bad_request

log = logging.getLogger("codeq.console")


class BadQueryMiddleware(MiddlewareMixin):
    """Answers 400 where Django's lists, which hand on whatever their address says, would answer 500."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, DataError | OverflowError):
            return None
        log.warning("%s cannot answer that: %s", request.path, type(exception).__name__)
        return bad_request(request, SuspiciousOperation())
