"""A deployment without `up`: separate processes on existing servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.redis.connections import client
from core.redis.partitions import PARTITIONS_KEY
from tests.faults.deployment import Deployment, Process, get_database_url
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
Start = Callable[[Deployment], Process]
STARTS = {"web": Deployment.web, "worker": Deployment.worker, "beat": Deployment.beat}


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    deployments: list[Deployment] = []

    def make(**environment: str) -> Deployment:
        directory = tmp_path / f"{len(deployments)}"
        directory.mkdir()
        deployments.append(Deployment(directory, get_database_url(), **environment))
        return deployments[-1]

    yield make
    for deployment in deployments:
        deployment.close()


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_first_process_fixes_the_number_of_partitions(deployed: Callable[..., Deployment], start: Start) -> None:
    start(deployed(CODEQ_PARTITIONS="4"))
    assert until(lambda: client().get(PARTITIONS_KEY), 30) == b"4"


@pytest.mark.parametrize(("name", "start"), STARTS.items(), ids=STARTS.keys())
def test_process_with_another_number_of_partitions_does_not_start(
    deployed: Callable[..., Deployment], name: str, start: Start
) -> None:
    client().set(PARTITIONS_KEY, 16)
    deployment = deployed(CODEQ_PARTITIONS="4")
    assert start(deployment).wait(30) == 1
    assert (
        "set up with 16 partitions, but the settings have 4. Set CODEQ_PARTITIONS=16"
        in deployment.log(name).read_text()
    )
    assert client().get(PARTITIONS_KEY) == b"16"


def test_concurrent_first_starts_agree_on_one_number_of_partitions(deployed: Callable[..., Deployment]) -> None:
    deployments = {count: deployed(CODEQ_PARTITIONS=count) for count in ("4", "8")}
    started = {count: [deployment.web(), deployment.beat()] for count, deployment in deployments.items()}
    decided = until(lambda: client().get(PARTITIONS_KEY), 30).decode()
    refused = started.pop("8" if decided == "4" else "4")
    assert [process.wait(30) for process in refused] == [1, 1]
    deployments[decided].wait_until_it_accepts_connections()
    assert client().get(PARTITIONS_KEY) == decided.encode()
