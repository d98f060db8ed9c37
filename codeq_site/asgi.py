"""Where an ASGI server begins: `codeq_site.asgi:application`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from codeq_site.tracing import Application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")


def make() -> Application:
    django.setup(set_prefix=False)
    # Only now: what it imports reads the settings and the apps.
    from codeq_site.front import Front
    from codeq_site.tracing import traced

    return traced(Front())


application = make()
