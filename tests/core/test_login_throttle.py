"""The limit on login attempts in the console."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth import get_user
from django.contrib.auth.hashers import make_password
from django.core.cache import caches
from django.http import HttpResponse
from django.test import Client

from core.admin import login_throttle
from core.admin.login_throttle import MAX_ATTEMPTS, WINDOW_SECONDS
from tests.conftest import free_port
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db
PASSWORD = "the-right-one-of-the-tests"
THROTTLED = pytest.mark.spec("AUT-3", "Attempts to log in are limited by name and address: 429 with Retry-After")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves, ten seconds after the start of a window."""
    now = [1_700_000_100.0 // WINDOW_SECONDS * WINDOW_SECONDS + 10]
    monkeypatch.setattr(login_throttle, "_now", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def _fast_password_hasher(settings: object) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # type: ignore[attr-defined]


@pytest.fixture
def user_name() -> str:
    return UserFactory(username="root", password=make_password(PASSWORD), is_superuser=True).username


def log_in(name: str, password: str, address: str = "198.51.100.7") -> tuple[HttpResponse, bool]:
    """Return the response, and whether the client is now logged in."""
    client = Client(REMOTE_ADDR=address)
    answer = client.post("/admin/login/", {"username": name, "password": password, "next": "/admin/"})
    return answer, get_user(client).is_authenticated  # type: ignore[arg-type]


def guess(name: str, times: int, address: str = "198.51.100.7") -> list[int]:
    """Try wrong passwords, and return the statuses."""
    return [log_in(name, f"guess {number}", address)[0].status_code for number in range(times)]


@THROTTLED
def test_correct_password_is_refused_after_too_many_attempts(user_name: str, clock: list[float]) -> None:
    assert guess(user_name, MAX_ATTEMPTS["both"]) == [200] * MAX_ATTEMPTS["both"]
    answer, is_logged_in = log_in(user_name, PASSWORD)
    assert (answer.status_code, answer["Retry-After"], is_logged_in) == (429, "290", False)
    assert "Too many attempts. Try again in 290 s." in answer.content.decode()
    clock[0] += 289
    answer, is_logged_in = log_in(user_name, PASSWORD)
    assert (answer.status_code, answer["Retry-After"], is_logged_in) == (429, "1", False)
    assert "Try again in 1 s." in answer.content.decode()
    clock[0] += 1
    answer, is_logged_in = log_in(user_name, PASSWORD)
    assert (answer.status_code, is_logged_in) == (302, True)


@THROTTLED
def test_attempts_from_another_address_do_not_lock_a_user_out(user_name: str) -> None:
    guess(user_name, 3 * MAX_ATTEMPTS["both"], "203.0.113.9")
    assert log_in(user_name, PASSWORD)[1]


@THROTTLED
@pytest.mark.parametrize(
    ("scope", "guesses"),
    [
        ("address", [(f"name-{number}", "198.51.100.7") for number in range(7)]),
        ("name", [("root", f"203.0.113.{number}") for number in range(7)]),
    ],
)
def test_many_names_or_many_addresses_do_not_avoid_the_limit(
    user_name: str, scope: str, guesses: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_ATTEMPTS, scope, 7)
    for name, address in guesses:
        assert guess(name, 1, address) == [200]
    assert log_in(user_name, PASSWORD)[0].status_code == 429


@THROTTLED
def test_correct_logins_are_not_limited(user_name: str) -> None:
    for _ in range(2 * MAX_ATTEMPTS["both"]):
        assert log_in(user_name, PASSWORD)[1]
    guess(user_name, MAX_ATTEMPTS["both"] - 1)
    assert log_in(user_name, PASSWORD)[1]


@THROTTLED
def test_concurrent_attempts_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(16) as pool:
        waits = list(pool.map(lambda _: login_throttle.count_attempt("root", "198.51.100.7"), range(40)))
    assert waits.count(0) == MAX_ATTEMPTS["both"]


@THROTTLED
def test_process_counts_attempts_itself_if_redis_is_unavailable(
    user_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable = type(caches["default"])(f"redis://127.0.0.1:{free_port()}/0", {})
    monkeypatch.setattr(login_throttle, "cache", unavailable)
    assert guess(user_name, MAX_ATTEMPTS["both"] + 1) == [200] * MAX_ATTEMPTS["both"] + [429]


def test_form_without_a_password_is_not_an_attempt(user_name: str) -> None:
    for _ in range(2 * MAX_ATTEMPTS["both"]):
        assert log_in(user_name, "")[0].status_code == 200
    assert log_in(user_name, PASSWORD)[1]


def test_log_has_the_address_but_no_user_name(user_name: str, caplog: pytest.LogCaptureFixture) -> None:
    guess(user_name, MAX_ATTEMPTS["both"] + 1)
    assert "too many login attempts from 198.51.100.7" in caplog.text
    assert user_name not in caplog.text.replace("codeq", "")
    assert "guess" not in caplog.text
