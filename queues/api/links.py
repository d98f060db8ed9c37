"""OpenAPI links: values of a response that other operations take, such as a task's id."""

from __future__ import annotations

from typing import Final

_TASK_ID: Final = {"task_id": "$response.body#/id"}
_FIRST_TASK_ID: Final = {"task_id": "$response.body#/tasks/0/id"}
_REQUESTED_TASK_ID: Final = {"task_id": "$request.path.task_id"}
_LEASE_OPERATIONS: Final = ("heartbeat", "nack", "abandon", "submit")
_BULK_JOB_ID: Final = {"job_id": "$response.body#/id"}
_SUBSCRIPTION_ID: Final = {"subscription_id": "$response.body#/subscriptionId"}
_QUEUE: Final = {"command": "$response.body#/command"}

# Operation -> status -> (linked operations, the parameters that they take from the response).
LINKS: Final[dict[str, dict[int, list[tuple[tuple[str, ...], dict[str, str]]]]]] = {
    "enqueue": {202: [(("get_task", "get_result", "cancel"), _TASK_ID), (("queue_stats", "pause", "resume"), _QUEUE)]},
    "enqueue_batch": {200: [(("get_task", "cancel"), {"task_id": "$response.body#/results/0/task/id"})]},
    "search": {200: [(("get_task", "get_result"), _FIRST_TASK_ID)]},
    "claim": {200: [(_LEASE_OPERATIONS, _TASK_ID)]},
    "claim_batch": {200: [(_LEASE_OPERATIONS, _FIRST_TASK_ID)]},
    "exchange": {200: [(_LEASE_OPERATIONS, _FIRST_TASK_ID)]},
    "submit": {200: [(("get_result", "get_task"), _REQUESTED_TASK_ID)]},
    "nack": {200: [(("get_task",), _REQUESTED_TASK_ID)]},
    "replay": {202: [(("get_bulk_job", "cancel_bulk_job"), _BULK_JOB_ID)]},
    "put_topic": {status: [(("get_topic", "delete_topic"), {"name": "$response.body#/name"})] for status in (200, 201)},
    "subscribe": {200: [(("renew_subscription", "unsubscribe"), _SUBSCRIPTION_ID)]},
    "list_subscriptions": {
        200: [
            (
                ("renew_subscription", "unsubscribe"),
                {"subscription_id": "$response.body#/subscriptions/0/subscriptionId"},
            )
        ]
    },
}
