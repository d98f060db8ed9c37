"""What Celery takes off its broker."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads, registry

from codeq_site.celery import app

EXECUTED: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return EXECUTED.append, ("executed",)


@pytest.mark.spec("BEA-1", "Nothing but JSON is taken off the broker: whoever can write to it can execute nothing")
@pytest.mark.parametrize("kind", sorted(set(registry.type_to_name) - {"application/json"}))
def test_only_json_is_read_from_the_broker(kind: str) -> None:
    assert app.conf.task_serializer == "json"
    with pytest.raises(ContentDisallowed):
        loads(pickle.dumps(Bomb()), kind, "binary", accept=app.conf.accept_content)
    assert EXECUTED == []
