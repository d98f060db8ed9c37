"""Fingerprints: the console and Spark give all occurrences of a failure the same name."""

from __future__ import annotations

import random
import string
import time
import uuid
from typing import Any

import pytest

from core.failure_fingerprint import MAX_LENGTH, fingerprint, normalise
from pipeline.spark.transforms.failures import add_fingerprint


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("timeout after 1500 ms", "timeout after <n> ms"),
        ("order 7f0b1c9e-0d1e-4a52-9d5c-1d2f3a4b5c6d is gone", "order <uuid> is gone"),
        ("no answer from 10.1.2.3:8443", "no answer from <ip>"),
        ("GET https://api.example/v1/orders/17?x=1 failed", "GET <url> failed"),
        ("bounced: jo.doe+x@example.org", "bounced: <email>"),
        ("at 2026-03-10T12:00:01.250Z the disk was full", "at <time> the disk was full"),
        ("HTTP 503 after 3 tries", "HTTP 503 after <n> tries"),
        ("HTTP 404 after 3 tries", "HTTP 404 after <n> tries"),
        ("errno 28 on /var/data/17/part-0.tmp", "errno 28 on <path>"),
        ("digest 0xdeadBEEF mismatches deadbeef01", "digest <hex> mismatches <hex>"),
        ("KeyError: 'customer'", "KeyError: 'customer'"),
        ("  two\n\tlines ", "two lines"),
        ("versions 1.2.3 and 4,500", "versions <n> and <n>"),
        ("Traceback (most recent call last):\n  File \"/a/b.py\", line 3\nValueError: bad 7", "ValueError: bad <n>"),
        ("", "(no message)"),
        ("größe 7 zu groß 🙂", "größe <n> zu groß 🙂"),
    ],
)  # fmt: skip
def test_varying_parts_of_a_message_are_replaced(message: str, name: str) -> None:
    assert normalise(message) == name


def test_fingerprint_contains_the_command() -> None:
    assert fingerprint("render", "boom 1") == "render: boom <n>"
    assert fingerprint("resize", "boom 1") != fingerprint("render", "boom 1")


def test_fingerprint_has_a_bounded_length() -> None:
    assert len(normalise("wörd " * 1000)) <= MAX_LENGTH


@pytest.mark.parametrize("letter", [*"a1 /.@-<:'\n", "0x", "a@", "/a", "1.", "Traceback \n"])
def test_no_message_takes_quadratic_time(letter: str) -> None:
    started = time.thread_time()
    normalise(letter * (100_000 // len(letter)))
    assert time.thread_time() - started < 1.0


TRACEBACK = "Traceback (most recent call last):\n  x\nValueError: y"


def generate_message(rng: random.Random) -> str:
    """Generate a message from matches of the patterns, near misses, and noise."""
    generators = [
        lambda: str(rng.randrange(10 ** rng.randrange(1, 20))),
        lambda: str(uuid.UUID(int=rng.getrandbits(128))),
        lambda: str(uuid.UUID(int=rng.getrandbits(128)))[: rng.randrange(1, 40)],
        lambda: ".".join(str(rng.randrange(300)) for _ in range(rng.randrange(2, 6))),
        lambda: f"{rng.randrange(1900, 2100)}-{rng.randrange(14):02}-03{rng.choice('T _')}{rng.randrange(30)}:00",
        lambda: rng.choice(["http", "https", "HTTPS", "ftp"]) + "://host.example/" + str(rng.randrange(99)),
        lambda: rng.choice(["/var/log/x", "/a", "a/b/c", "//x/y", "C:\\x\\7", "/ü/y/z"]),
        lambda: rng.choice(["HTTP ", "http ", "Status ", "code ", "errno ", "Errno "]) + str(rng.randrange(999)),
        lambda: f"{rng.randbytes(rng.randrange(1, 40)).hex()}",
        lambda: "0x" + f"{rng.getrandbits(64):X}",
        lambda: rng.choice(["jo@example.org", "@", "a@", "ü@x.de", "x%y+z@q"]),
        lambda: "".join(rng.choice(string.printable) for _ in range(rng.randrange(20))),
        lambda: rng.choice([TRACEBACK, "Traceback", "\n", "\r\n", "\x0b\x85\u2028"]),
        lambda: "".join(rng.choice("ä€🙂\u0660\u2003\uff11\u0130\x85\xa0") for _ in range(3)),
        lambda: rng.choice(["<n>", "<uuid>", "$1", "\\1", "${n}", "'", '"', "word", "A_9", "9_A", "e1", ""]),
    ]  # fmt: skip
    text = rng.choice(["", " ", ",", ":"]).join(rng.choice(generators)() for _ in range(rng.randrange(12)))
    # PostgreSQL does not store NUL, so neither implementation receives it.
    return text.replace("\x00", "")


@pytest.mark.spec("PIP-2", "The console and Spark compute the same fingerprint of a failure")
def test_spark_and_python_agree_on_thousands_of_messages(spark: Any) -> None:
    rng = random.Random(20260310)
    messages = [generate_message(rng) for _ in range(6000)]
    messages += [("x" * n) + "7" for n in (198, 199, 200, 201)] + ["🙂" * 250, "7" * 5000, "/a" * 3000]
    frame = spark.createDataFrame([("render", message) for message in messages], "command string, message string")
    rows = add_fingerprint(frame).withColumnRenamed("fingerprint", "name").collect()
    differing = [(row["message"], row["name"]) for row in rows if row["name"] != fingerprint("render", row["message"])]
    assert differing == []
    assert len(rows) == len(messages)
    assert len({row["name"] for row in rows}) > 1000
