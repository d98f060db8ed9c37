"""The composition root: settings, URLs, processes and commands that connect the apps."""

from codeq_site.celery import app as celery_app

__all__ = ["celery_app"]
