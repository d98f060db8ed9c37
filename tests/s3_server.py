"""An S3 server on the loopback."""

from __future__ import annotations

import signal
import subprocess
import sys

import boto3
import psutil

from tests.conftest import free_port
from tests.waiting import until

BUCKET = "codeq-artifacts"
CREDENTIALS = {"region_name": "eu-central-1", "aws_access_key_id": "key", "aws_secret_access_key": "secret"}


class S3Server:
    """moto's server, in a process that can be suspended."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = boto3.client("s3", endpoint_url=self.url, **CREDENTIALS)
        until(self.is_up, 60, every=0.1)
        self.client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})

    def is_up(self) -> bool:
        assert self.process.poll() is None
        listening = psutil.Process(self.process.pid).net_connections(kind="tcp")
        return any(connection.status == psutil.CONN_LISTEN for connection in listening)

    def list_names(self) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def clear(self) -> None:
        for name in self.list_names():
            self.client.delete_object(Bucket=BUCKET, Key=name)

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
