"""Error replies become the same exceptions on the multiplexed connection as in redis-py."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import redis
from redis.exceptions import ResponseError

from core.redis.error_replies import CLASSES, parse_error_reply


@pytest.fixture
def redis_py_error() -> Iterator[Callable[[str], Exception]]:
    """Return the exception that redis-py raises for an error reply."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def raise_error(reply: str) -> Exception:
            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    while b"key" not in (command := connection.recv(4096)):
                        connection.sendall(b"+OK\r\n" * command.count(b"SETINFO"))
                    connection.sendall(f"-{reply}\r\n".encode())

            server = Thread(target=answer)
            server.start()
            client = redis.Redis(port=listener.getsockname()[1], protocol=2, retry=None)
            try:
                with pytest.raises(redis.RedisError) as raised:
                    client.execute_command("GET", "key")
            finally:
                client.close()
                server.join(5)
            return raised.value

        yield raise_error


@pytest.mark.parametrize(
    "reply",
    [
        *(f"{word} 3999 127.0.0.1:6381" for word in sorted(CLASSES)),
        "MISCONF Valkey cannot persist to disk.",
        "NOREPLICAS Not enough good replicas to write.",
        "BUSY Valkey is busy running a script.",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "CODEQ a failed script",
    ],
    ids=lambda reply: reply.split()[0],
)
def test_error_reply_is_the_exception_of_redis_py(redis_py_error: Callable[[str], Exception], reply: str) -> None:
    expected, error = redis_py_error(reply), parse_error_reply(reply)
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert {name: getattr(error, name) for name in ("slot_id", "host", "port") if hasattr(expected, name)} == {
        name: getattr(expected, name) for name in ("slot_id", "host", "port") if hasattr(expected, name)
    }


def test_reply_of_one_word_is_a_response_error() -> None:
    assert type(parse_error_reply("ODD")) is ResponseError
    assert str(parse_error_reply("ODD")) == "ODD"
