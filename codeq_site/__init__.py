"""The composition root: wires the apps together and decides nothing about tasks."""

from codeq_site.celery import app as celery_app

__all__ = ["celery_app"]
