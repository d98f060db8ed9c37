"""A client of codeQ with nothing but Python's standard library: one task, all the way.

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
    """The service said no. `code` is what to switch on."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.status: int = said["status"]
        self.code: str = said["code"]
        super().__init__(f"{self.status} {self.code}: {said['detail']} (request {said['requestId']})")


class Client:
    def __init__(self, base: str, token: str) -> None:
        self.base = base.rstrip("/") + "/v1/codeq"
        self.token = token

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, None for a 204; raises Problem."""
        request = urllib.request.Request(  # noqa: S310 - the address is the user's own
            self.base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            # A little longer than the longest poll.
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
        asked = {"commands": list(commands), "leaseSeconds": lease_seconds, "waitSeconds": wait_seconds}
        return self.call("POST", "/tasks/claim", asked)

    def heartbeat(self, task: Any, extend_seconds: int = 60, percent: float = 0) -> Any:
        said = {"extendSeconds": extend_seconds, "progress": {"percent": percent}, "leaseToken": task["leaseToken"]}
        return self.call("POST", f"/tasks/{task['id']}/heartbeat", said)

    def complete(self, task: Any, result: dict[str, Any]) -> Any:
        said = {"status": "COMPLETED", "result": result, "leaseToken": task["leaseToken"]}
        return self.call("POST", f"/tasks/{task['id']}/result", said)


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

    answer = producer.result(task["id"], wait_seconds=5)
    print(f"result    {task['id']} {answer['result']['status']} {json.dumps(answer['result']['result'])}")

    print(f"task      {task['id']} {producer.task(task['id'])['status']}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
