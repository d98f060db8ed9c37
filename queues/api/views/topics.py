"""Topics: the policies of queues."""

from __future__ import annotations

from django.http import HttpResponse

from core import errors, threadpool
from core.http.api_view import ApiView, json_response, no_content
from core.http.operation import Operation
from queues import policies
from queues.api.conversion import to_int
from queues.api.schemas import topics as wire
from queues.models import QueuePolicy
from queues.policies import Policy
from tenants.domain import Caller
from tenants.permissions import IsAdmin


class TopicsView(ApiView):
    @Operation(
        "list_topics",
        tag="Admin",
        summary="List the queues that have a policy",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.Topics},
    )
    async def get(self, caller: Caller) -> HttpResponse:
        """List policies in the order of the queues' names."""
        rows = await threadpool.run_db(lambda: list(policies.list_rows(caller.tenant)))
        return json_response(wire.Topics(topics=[_topic(row) for row in rows]))


class TopicView(ApiView):
    @Operation(
        "get_topic",
        tag="Admin",
        summary="Read a queue's policy",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.Topic},
        errors=(errors.NotFound,),
    )
    async def get(self, caller: Caller, name: str) -> HttpResponse:
        """Read the policy of a queue. Answers 404 if the queue has no policy."""
        return json_response(_topic(await threadpool.run_db(policies.find, caller.tenant, name)))

    @Operation(
        "put_topic",
        tag="Admin",
        summary="Set a queue's policy",
        permission_classes=(IsAdmin,),
        rate="admin",
        body=wire.NewTopic,
        answers={200: wire.Topic, 201: wire.Topic},
        errors=(errors.Conflict,),
    )
    async def put(self, caller: Caller, name: str, body: wire.NewTopic) -> HttpResponse:
        """Replace the policy of a queue.

        The new policy takes effect within seconds. Answers 201 if the queue had no policy.
        """
        tiers = body.priority_tiers
        policy = Policy(
            max_attempts=to_int(body.max_attempts),
            priority_tiers=None if tiers is None else tuple(map(int, tiers)),
            retention_seconds=to_int(body.retention_seconds),
            max_consumers=to_int(body.max_consumers),
            dead_letter_topic=body.dead_letter_topic_ref or "",
            backoff=body.backoff or "",
            backoff_base_seconds=body.backoff_base_seconds,
            backoff_cap_seconds=body.backoff_cap_seconds,
        )
        row, is_new = await threadpool.run_db(policies.put, caller.tenant, name, policy, actor=caller.subject)
        return json_response(_topic(row), 201 if is_new else 200)

    @Operation(
        "delete_topic",
        tag="Admin",
        summary="Delete a queue's policy",
        permission_classes=(IsAdmin,),
        rate="admin",
        query=wire.DeletionQuery,
        answers={204: None},
        errors=(errors.NotFound,),
    )
    async def delete(self, caller: Caller, name: str, query: wire.DeletionQuery) -> HttpResponse:
        """Delete the policy of a queue. The defaults apply again; the tasks of the queue stay."""
        await threadpool.run_db(policies.delete, caller.tenant, name)
        return no_content()


def _topic(row: QueuePolicy) -> wire.Topic:
    return wire.Topic(
        name=row.command,
        version=row.version,
        priority_tiers=row.priority_tiers,
        max_attempts=row.max_attempts,
        dead_letter_topic_ref=row.dead_letter_topic or None,
        retention_seconds=row.retention_seconds,
        max_consumers=row.max_consumers,
        backoff=row.backoff or None,
        backoff_base_seconds=row.backoff_base_seconds,
        backoff_cap_seconds=row.backoff_cap_seconds,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
