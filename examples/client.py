"""A codeQ client that uses only Python's standard library, and the life cycle of one task.

PRODUCER=$(python manage.py token --tenant demo --role producer)
WORKER=$(python manage.py token --tenant demo --role worker)
python examples/client.py http://127.0.0.1:8080 "$PRODUCER" "$WORKER"
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any


class Problem(Exception):
    """An error response of the service. Branch on `code`, not on the text."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.status: int = problem["status"]
        self.code: str = problem["code"]
        super().__init__(f"{self.status} {self.code}: {problem['detail']} (request {problem['requestId']})")


class Client:
    def __init__(self, base: str, token: str) -> None:
        self.base = base.rstrip("/") + "/v1/codeq"
        self.token = token

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the response, or None for a 204. Raises Problem."""
        request = urllib.request.Request(  # noqa: S310 - the user chooses the address
            self.base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            # A little longer than the longest long poll.
            with urllib.request.urlopen(request, timeout=70) as response:  # noqa: S310
                return json.load(response) if response.status != 204 else None
        except urllib.error.HTTPError as error:
            raise Problem(json.load(error)) from None

    # Producers

    def enqueue(self, command: str, payload: Any, **options: Any) -> Any:
        return self.call("POST", "/tasks", {"command": command, "payload": payload, **options})

    def task(self, task_id: str) -> Any:
        return self.call("GET", f"/tasks/{task_id}")

    def result(self, task_id: str, wait_seconds: int = 0) -> Any:
        return self.call("GET", f"/tasks/{task_id}/result?waitSeconds={wait_seconds}")

    # Workers

    def claim(self, *commands: str, lease_seconds: int = 60, wait_seconds: int = 0) -> Any:
        body = {"commands": list(commands), "leaseSeconds": lease_seconds, "waitSeconds": wait_seconds}
        return self.call("POST", "/tasks/claim", body)

    def heartbeat(self, task: Any, extend_seconds: int = 60, percent: float = 0) -> Any:
        body = {"extendSeconds": extend_seconds, "progress": {"percent": percent}, "leaseToken": task["leaseToken"]}
        return self.call("POST", f"/tasks/{task['id']}/heartbeat", body)

    def complete(self, task: Any, result: dict[str, Any]) -> Any:
        body = {"status": "COMPLETED", "result": result, "leaseToken": task["leaseToken"]}
        return self.call("POST", f"/tasks/{task['id']}/result", body)


def main(base: str, producer_token: str, worker_token: str) -> None:
    producer, worker = Client(base, producer_token), Client(base, worker_token)

    task = producer.enqueue("ADD", {"numbers": [1, 2, 3]}, priority=5)
    print(f"enqueued  {task['id']} {task['status']}")

    claimed = worker.claim("ADD", wait_seconds=5)
    print(f"claimed   {claimed['id']} until {claimed['leaseUntil']}")

    lease = worker.heartbeat(claimed, percent=50)
    print(f"heartbeat {claimed['id']} until {lease['leaseUntil']}")

    numbers = json.loads(claimed["payload"])["numbers"]
    worker.complete(claimed, {"sum": sum(numbers)})

    response = producer.result(task["id"], wait_seconds=5)
    print(f"result    {task['id']} {response['result']['status']} {json.dumps(response['result']['result'])}")

    print(f"task      {task['id']} {producer.task(task['id'])['status']}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
