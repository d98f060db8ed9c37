"""The ASGI application: `codeq_site.asgi:application`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from core.tracing import Application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")


def make_application() -> Application:
    django.setup(set_prefix=False)
    # These modules read the settings and the app registry on import.
    from core.http.router import Router
    from core.tracing import traced
    from queues.long_poll import registry

    router = Router(on_startup=registry().open, on_shutdown=registry().close)
    return traced(router)


application = make_application()
