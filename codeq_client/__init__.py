"""Python client of codeQ.

`Client` enqueues tasks and reads results; `Worker` runs your functions on tasks. Requires httpx and msgspec
(`pip install codeq-server[client]`), and does not import the service.
"""

from codeq_client.client import Client
from codeq_client.errors import CodeqError, Conflict, NotFound, TooMany, Unavailable
from codeq_client.tasks import NewTask, Result, Task
from codeq_client.worker import Fail, Job, LeaseLost, Retry, Worker

__all__ = [
    "Client",
    "CodeqError",
    "Conflict",
    "Fail",
    "Job",
    "LeaseLost",
    "NewTask",
    "NotFound",
    "Result",
    "Retry",
    "Task",
    "TooMany",
    "Unavailable",
    "Worker",
]
