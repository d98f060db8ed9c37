"""The examples of the OpenAPI document, by operation.

A test decodes and encodes each of them.
"""

from __future__ import annotations

from typing import Any

ID = "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"
TOKEN = "5f0c7f0e9a3b4f41a1d2c3b4a5968778"  # noqa: S105 - an example
CREATED, CLAIMED, ENDED = "2026-01-25T13:00:00.123Z", "2026-01-25T13:00:01.456Z", "2026-01-25T13:00:09.789Z"

NEW_TASK = {
    "command": "RENDER_VIDEO",
    "payload": {"jobId": "j-123"},
    "priority": 5,
    "webhook": "https://example.org/codeq/hook",
    "idempotencyKey": "job-j-123",
}
TASK = {
    "id": ID,
    "command": "RENDER_VIDEO",
    "payload": '{"jobId":"j-123"}',
    "priority": 5,
    "status": "PENDING",
    "attempts": 0,
    "maxAttempts": 5,
    "webhook": "https://example.org/codeq/hook",
    "tenantId": "acme",
    "createdAt": CREATED,
    "updatedAt": CREATED,
    "lastKnownLocation": "PENDING_LIST",
}
CLAIMED_TASK = TASK | {
    "status": "IN_PROGRESS",
    "workerId": "worker-1",
    "leaseUntil": "2026-01-25T13:05:01.456Z",
    "leaseToken": TOKEN,
    "updatedAt": CLAIMED,
    "lastKnownLocation": "INPROG_SET",
}
ENDED_TASK = TASK | {
    "status": "COMPLETED",
    "workerId": "worker-1",
    "resultKey": f"/v1/codeq/tasks/{ID}/result",
    "updatedAt": ENDED,
    "lastKnownLocation": "NONE",
}
NEW_RESULT = {
    "status": "COMPLETED",
    "result": {"frames": 240},
    "artifacts": [
        {"name": "log.txt", "contentBase64": "ZG9uZQ==", "contentType": "text/plain"},
        {"name": "film.mp4", "url": "https://example.org/films/7.mp4"},
    ],
    "leaseToken": TOKEN,
}
DIGEST = "6b2ebe2e3ba8b28b3e45d5f9c2e5c6d2fa46c0c79d0ae8b1e1a46d1d3f0a2c11"
ARTIFACTS = [
    {"name": "log.txt", "url": f"/v1/codeq/tasks/{ID}/artifacts/{DIGEST}", "contentType": "text/plain", "size": 4},
    {"name": "film.mp4", "url": "https://example.org/films/7.mp4"},
]
RESULT = {
    "taskId": ID,
    "status": "COMPLETED",
    "result": {"frames": 240},
    "artifacts": ARTIFACTS,
    "workerId": "worker-1",
    "attempts": 0,
    "completedAt": ENDED,
}
LEASE_LOST = {
    "taskId": ID,
    "error": "lease_lost",
    "status": 409,
    "detail": "The lease has ended: it expired, the task was returned, or the task has ended. Stop working on it.",
}
STATS = {
    "command": "RENDER_VIDEO",
    "ready": 124,
    "delayed": 5,
    "inProgress": 5,
    "dlq": 0,
    "paused": False,
    "oldestReadySeconds": 2.5,
    "readyByPriority": [100, 0, 0, 0, 0, 24, 0, 0, 0, 0],
}
DEAD_LETTER = {
    "id": ID,
    "command": "RENDER_VIDEO",
    "priority": 5,
    "error": "disk full",
    "failure": "6b2ebe2e3ba8b28b",
    "deliveries": 5,
    "attempts": 5,
    "maxAttempts": 5,
    "workerId": "worker-1",
    "payloadStart": '{"jobId":"j-123"}',
    "createdAt": CREATED,
    "diedAt": ENDED,
}
BULK_JOB = {
    "id": "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e99",
    "kind": "replay",
    "state": "running",
    "total": 1200,
    "done": 400,
    "skipped": 3,
    "failed": 0,
    "ratePerSecond": 100,
    "reason": "the disk is larger now",
    "createdAt": CREATED,
    "startedAt": CLAIMED,
}
POLICY = {"priorityTiers": [0, 5, 9], "maxAttempts": 8, "deadLetterTopicRef": "RENDER_FAILED", "maxConsumers": 20}
TOPIC = {"name": "RENDER_VIDEO", "version": 2, **POLICY, "createdAt": CREATED, "updatedAt": ENDED}
SUBSCRIPTION_ID = "7f3c1a5b-7d9e-4c2f-8a6b-0d1e3f507294"
NEW_CLAIM = {"commands": ["RENDER_VIDEO"], "leaseSeconds": 300, "waitSeconds": 20}

# The bodies of each operation: of the request ("request"), and of the response with each status.
EXAMPLES: dict[str, dict[str | int, Any]] = {
    "enqueue": {"request": NEW_TASK, 202: TASK},
    "enqueue_batch": {
        "request": {"tasks": [NEW_TASK, {"command": "RENDER_VIDEO", "payload": "…"}]},
        200: {"results": [{"task": TASK}, {"error": "payload_too_large", "status": 413, "detail": "payload: …"}]},
    },
    "get_task": {200: TASK},
    "cancel": {200: TASK | {"status": "CANCELLED", "lastKnownLocation": "NONE"}},
    "get_result": {200: {"task": ENDED_TASK, "result": RESULT}},
    "claim": {"request": NEW_CLAIM, 200: CLAIMED_TASK},
    "claim_batch": {"request": NEW_CLAIM | {"count": 10}, 200: {"tasks": [CLAIMED_TASK]}},
    "heartbeat": {
        "request": {"extendSeconds": 300, "leaseToken": TOKEN, "progress": {"percent": 40, "note": "frame 96"}},
        200: {"ok": True, "leaseUntil": "2026-01-25T13:05:05.456Z"},
    },
    "abandon": {"request": {"leaseToken": TOKEN}, 200: {"status": "requeued"}},
    "nack": {
        "request": {"reason": "the disk is full", "delaySeconds": 30, "leaseToken": TOKEN},
        200: {"status": "requeued", "delaySeconds": 30},
    },
    "submit": {"request": NEW_RESULT, 200: RESULT},
    "submit_batch": {
        "request": {"results": [NEW_RESULT | {"taskId": ID}]},
        200: {"results": [{"taskId": ID, "result": RESULT}, LEASE_LOST]},
    },
    "exchange": {
        "request": NEW_CLAIM | {"count": 10, "results": [NEW_RESULT | {"taskId": ID}]},
        200: {"results": [{"taskId": ID, "result": RESULT}], "tasks": [CLAIMED_TASK]},
    },
    "search": {200: {"tasks": [TASK], "cursor": "ended:1769346009789000-01920f3e8d5a7c319a540b6f3c2d1e10"}},
    "list_dead_letters": {200: {"deadLetters": [DEAD_LETTER]}},
    "replay": {
        "request": {"filter": {"error": "disk full"}, "ratePerSecond": 100, "reason": "the disk is larger now"},
        200: {"count": 1, "sample": [DEAD_LETTER]},
        202: BULK_JOB,
    },
    "get_bulk_job": {200: BULK_JOB},
    "cancel_bulk_job": {200: BULK_JOB | {"state": "cancelling"}},
    "list_topics": {200: {"topics": [TOPIC]}},
    "get_topic": {200: TOPIC},
    "put_topic": {"request": POLICY, 200: TOPIC, 201: TOPIC | {"version": 1}},
    "list_subscriptions": {
        200: {
            "subscriptions": [
                {
                    "subscriptionId": SUBSCRIPTION_ID,
                    "callbackUrl": "https://worker.example.com/wake",
                    "eventTypes": ["RENDER_VIDEO"],
                    "deliveryMode": "fanout",
                    "minIntervalSeconds": 5,
                    "expiresAt": "2026-01-25T13:05:00Z",
                    "createdAt": "2026-01-25T13:00:00Z",
                }
            ]
        }
    },
    "unsubscribe": {200: {"ok": True}},
    "list_queues": {200: {"queues": [STATS]}},
    "queue_stats": {200: STATS},
    "pause": {200: {"command": "RENDER_VIDEO", "paused": True}},
    "resume": {200: {"command": "RENDER_VIDEO", "paused": False}},
    "cleanup": {
        "request": {"limit": 1000},
        200: {"deleted": 12, "before": "2026-01-26T13:00:00Z", "limit": 1000},
    },
    "subscribe": {
        "request": {
            "callbackUrl": "https://worker.example.com/wake",
            "eventTypes": ["RENDER_VIDEO"],
            "ttlSeconds": 300,
            "deliveryMode": "group",
            "groupId": "renderers",
        },
    },
    "renew_subscription": {"request": {"ttlSeconds": 300}},
}
