"""The outbox of ranked queues."""

from __future__ import annotations

from django.db import models

from queues.models import tenant_key


class RankedEntry(models.Model):
    """An entry of a ranked queue that Redis does not have yet: see ranked/services.py."""

    tenant = tenant_key()
    queue = models.TextField()
    task_id = models.TextField()
    rank = models.PositiveSmallIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        # The table keeps its name from when the model was in the app `queues`.
        db_table = "queues_rankedentry"
        verbose_name_plural = "ranked entries"

    def __str__(self) -> str:
        return f"{self.tenant_id}:{self.queue} {self.task_id}"
