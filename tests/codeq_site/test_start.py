"""A deployment without `up`: processes that are started one by one, on servers that somebody else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.redis.connections import client
from core.redis.partitions import PARTITIONS_KEY
from tests.faults.deployment import Deployment, Process, own_database
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
Start = Callable[[Deployment], Process]
STARTS = {"web": Deployment.web, "worker": Deployment.worker, "beat": Deployment.beat}


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(**environment: str) -> Deployment:
        directory = tmp_path / f"{len(made)}"
        directory.mkdir()
        made.append(Deployment(directory, own_database(), **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_every_process_settles_the_partitions_at_its_start(deployed: Callable[..., Deployment], start: Start) -> None:
    start(deployed(CODEQ_PARTITIONS="4"))
    assert until(lambda: client().get(PARTITIONS_KEY), 30) == b"4"


@pytest.mark.parametrize(("name", "start"), STARTS.items(), ids=STARTS.keys())
def test_no_process_starts_with_other_partitions_than_the_data_was_written_with(
    deployed: Callable[..., Deployment], name: str, start: Start
) -> None:
    client().set(PARTITIONS_KEY, 16)
    deployment = deployed(CODEQ_PARTITIONS="4")
    assert start(deployment).wait(30) == 1
    assert "set up with 16 partitions, the settings say 4. Set CODEQ_PARTITIONS=16" in deployment.log(name).read_text()
    assert client().get(PARTITIONS_KEY) == b"16"


def test_of_processes_that_start_at_once_and_differ_one_sort_stays(deployed: Callable[..., Deployment]) -> None:
    deployments = {count: deployed(CODEQ_PARTITIONS=count) for count in ("4", "8")}
    started = {count: [each.web(), each.beat()] for count, each in deployments.items()}
    decided = until(lambda: client().get(PARTITIONS_KEY), 30).decode()
    lost = started.pop("8" if decided == "4" else "4")
    assert [process.wait(30) for process in lost] == [1, 1]
    deployments[decided].until_it_answers()
    assert client().get(PARTITIONS_KEY) == decided.encode()
