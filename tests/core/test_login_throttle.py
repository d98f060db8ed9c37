"""Passwords cannot be guessed at the console's door, one after the other or all at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth import get_user
from django.contrib.auth.hashers import make_password
from django.core.cache import caches
from django.http import HttpResponse
from django.test import Client

from core.admin import login_throttle
from core.admin.login_throttle import MOST, WINDOW_SECONDS
from tests.conftest import free_port
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db
PASSWORD = "the-right-one-of-the-tests"
THROTTLED = pytest.mark.spec("AUT-3", "Attempts to log in are limited by name and address: 429 with Retry-After (E-17)")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stands still, ten seconds into a window."""
    now = [1_700_000_100.0 // WINDOW_SECONDS * WINDOW_SECONDS + 10]
    monkeypatch.setattr(login_throttle, "_now", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def _quick(settings: object) -> None:
    """What a hash costs is not the point."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # type: ignore[attr-defined]


@pytest.fixture
def person() -> str:
    return UserFactory(username="root", password=make_password(PASSWORD), is_superuser=True).username


def enter(name: str, password: str, address: str = "198.51.100.7") -> tuple[HttpResponse, bool]:
    client = Client(REMOTE_ADDR=address)
    answer = client.post("/admin/login/", {"username": name, "password": password, "next": "/admin/"})
    return answer, get_user(client).is_authenticated  # type: ignore[arg-type]


def guess(name: str, times: int, address: str = "198.51.100.7") -> list[int]:
    return [enter(name, f"guess {number}", address)[0].status_code for number in range(times)]


@THROTTLED
def test_the_right_password_does_not_help_after_too_many_guesses(person: str, clock: list[float]) -> None:
    assert guess(person, MOST["both"]) == [200] * MOST["both"]
    answer, is_in = enter(person, PASSWORD)
    assert (answer.status_code, answer["Retry-After"], is_in) == (429, "290", False)
    assert "Too many attempts. Try again in 290 s." in answer.content.decode()
    clock[0] += 289
    answer, is_in = enter(person, PASSWORD)
    assert (answer.status_code, answer["Retry-After"], is_in) == (429, "1", False)
    assert "Try again in 1 s." in answer.content.decode()
    clock[0] += 1
    answer, is_in = enter(person, PASSWORD)
    assert (answer.status_code, is_in) == (302, True)


@THROTTLED
def test_guesses_from_elsewhere_shut_nobody_out(person: str) -> None:
    guess(person, 3 * MOST["both"], "203.0.113.9")
    assert enter(person, PASSWORD)[1]


@THROTTLED
@pytest.mark.parametrize(
    ("what", "guesses"),
    [
        ("address", [(f"name-{number}", "198.51.100.7") for number in range(7)]),
        ("name", [("root", f"203.0.113.{number}") for number in range(7)]),
    ],
)
def test_neither_many_names_nor_many_addresses_are_a_way_around(
    person: str, what: str, guesses: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST, what, 7)
    for name, address in guesses:
        assert guess(name, 1, address) == [200]
    assert enter(person, PASSWORD)[0].status_code == 429


@THROTTLED
def test_who_knows_the_password_may_come_as_often_as_they_like(person: str) -> None:
    for _ in range(2 * MOST["both"]):
        assert enter(person, PASSWORD)[1]
    guess(person, MOST["both"] - 1)
    assert enter(person, PASSWORD)[1]


@THROTTLED
def test_guesses_made_at_once_are_counted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(16) as pool:
        waits = list(pool.map(lambda _: login_throttle.attempt("root", "198.51.100.7"), range(40)))
    assert waits.count(0) == MOST["both"]


@THROTTLED
def test_without_redis_each_process_counts_for_itself(person: str, monkeypatch: pytest.MonkeyPatch) -> None:
    away = type(caches["default"])(f"redis://127.0.0.1:{free_port()}/0", {})
    monkeypatch.setattr(login_throttle, "cache", away)
    assert guess(person, MOST["both"] + 1) == [200] * MOST["both"] + [429]


def test_an_empty_form_is_no_attempt(person: str) -> None:
    for _ in range(2 * MOST["both"]):
        assert enter(person, "")[0].status_code == 200
    assert enter(person, PASSWORD)[1]


def test_the_log_names_nobody(person: str, caplog: pytest.LogCaptureFixture) -> None:
    guess(person, MOST["both"] + 1)
    assert "a login from 198.51.100.7 is refused" in caplog.text
    assert person not in caplog.text.replace("codeq", "")
    assert "guess" not in caplog.text
