"""The simulator: waits agree with queueing formulas, and each parameter has its effect."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pipeline.spark import cli, erlang, simulate
from pipeline.spark.lake import Lake
from pipeline.spark.simulate import Backoff, RecordedAttempt, Scenario, SimulatedTask, peak_concurrency, simulate_tasks
from tests.pipeline.history import Audit, build_attempt, build_facts


def generate_poisson_tasks(rate: float, service_ms: float, count: int, seed: int = 1) -> list[SimulatedTask]:
    rng = random.Random(seed)
    tasks, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate) * 1000
        tasks.append(SimulatedTask("c", round(now), (RecordedAttempt(round(rng.expovariate(1 / service_ms))),)))
    return tasks


@pytest.mark.spec("PIP-1", "The simulated waits of M/M/c agree with Erlang C within 5 %")
@pytest.mark.parametrize(("servers", "busy"), [(1, 0.6), (4, 0.7), (10, 0.8)])
def test_simulated_waits_agree_with_erlang_c(servers: int, busy: float) -> None:
    service_seconds = 2.0
    rate = busy * servers / service_seconds
    outcomes, share = simulate_tasks(generate_poisson_tasks(rate, 1000 * service_seconds, 250_000), Scenario(), servers)
    waits = np.asarray(outcomes["c"].waits) / 1000
    expected = erlang.mean_wait(rate, service_seconds, servers)
    assert waits.mean() == pytest.approx(expected, rel=0.05)
    assert (waits > 0.001).mean() == pytest.approx(
        erlang.waiting_probability(rate * service_seconds, servers), rel=0.05
    )
    assert share == pytest.approx(busy, rel=0.02)


def test_erlang_c_agrees_with_textbook_values() -> None:
    assert erlang.waiting_probability(0.5, 1) == pytest.approx(0.5)
    assert erlang.waiting_probability(2.0, 3) == pytest.approx(4 / 9)
    assert erlang.waiting_probability(9.0, 10) == pytest.approx(0.6687, abs=1e-4)
    assert erlang.mean_wait(1.0, 1.0, 1) == float("inf")
    # A constant service time halves the wait.
    assert erlang.mean_wait(1.0, 0.5, 1, cv2=0.0) == pytest.approx(erlang.mean_wait(1.0, 0.5, 1) / 2)


@pytest.mark.parametrize("target", [0.1, 1.0, 60.0])
def test_workers_needed_is_the_smallest_sufficient_number(target: float) -> None:
    rng = np.random.default_rng(3)
    rate, service, cv2 = rng.uniform(0.01, 5, 200), rng.uniform(0.1, 60, 200), rng.uniform(0, 3, 200)
    needed = erlang.workers_needed(rate, service, cv2, target)
    for r, s, v, c in zip(rate, service, cv2, needed, strict=True):
        assert erlang.mean_wait(r, s, int(c), v) <= target
        assert c == 1 or erlang.mean_wait(r, s, int(c) - 1, v) > target
    assert erlang.workers_needed([0.0], [1.0], [1.0], target)[0] == 0


def simulate_waits(tasks: list[SimulatedTask], scenario: Scenario, servers: int = 1) -> dict[str, list[int]]:
    return {command: outcome.waits for command, outcome in simulate_tasks(tasks, scenario, servers)[0].items()}


def test_free_worker_takes_the_highest_priority_and_then_the_oldest() -> None:
    tasks = [SimulatedTask("a", 0, (RecordedAttempt(100),))]
    tasks += [
        SimulatedTask(name, visible_ms, (RecordedAttempt(10),), priority)
        for name, visible_ms, priority in (("low", 1, 0), ("high", 2, 5), ("high", 3, 5))
    ]
    assert simulate_waits(tasks, Scenario()) == {"a": [0], "high": [98, 107], "low": [119]}
    assert simulate_waits(tasks, Scenario(priorities={"low": 9})) == {"a": [0], "low": [99], "high": [108, 117]}


def test_more_workers_shorten_the_wait() -> None:
    tasks = generate_poisson_tasks(1.0, 1500, 2000)
    mean = {n: float(np.mean(simulate_waits(tasks, Scenario(), n)["c"])) for n in (2, 3, 8)}
    assert mean[2] > mean[3] > mean[8]


def test_failed_task_is_retried_after_its_gap() -> None:
    task = SimulatedTask("c", 0, (RecordedAttempt(10, failed=True, gap_ms=100), RecordedAttempt(10)))
    outcome, _ = simulate_tasks([task], Scenario(), 1)
    assert (outcome["c"].waits, outcome["c"].dead) == ([0, 0], 0)
    # Another task runs in the meantime and delays the retry.
    other = SimulatedTask("d", 20, (RecordedAttempt(95),))
    assert simulate_waits([task, other], Scenario())["c"] == [0, 5]


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        ("fixed", [5.0, 5.0, 5.0]),
        ("linear", [5.0, 10.0, 15.0]),
        ("exponential", [5.0, 10.0, 20.0]),
        ("exp_full_jitter", [2.5, 5.0, 10.0]),
        ("exp_equal_jitter", [3.75, 7.5, 15.0]),
    ],
)
def test_simulated_backoff_is_the_mean_of_the_engines_backoff(policy: str, delays: list[float]) -> None:
    backoff = Backoff.parse(f"{policy}:5:900")
    assert [backoff.delay_ms(n) / 1000 for n in (1, 2, 3)] == delays
    assert Backoff.parse("exponential:5:60").delay_ms(30) == 60_000
    task = SimulatedTask("c", 0, (RecordedAttempt(10, failed=True, gap_ms=1), RecordedAttempt(10)))
    late = SimulatedTask("d", 11, (RecordedAttempt(round(delays[0] * 1000)),))
    assert simulate_waits([task, late], Scenario(backoff=backoff))["c"] == [0, 1]


def test_lease_shorter_than_the_run_repeats_the_run() -> None:
    task = SimulatedTask("c", 0, (RecordedAttempt(90_000),))
    long_lease, _ = simulate_tasks([task], Scenario(lease_seconds=120), 1)
    assert (long_lease["c"].duplicate_ms, long_lease["c"].dead) == (0, 0)
    short_lease, _ = simulate_tasks([task], Scenario(lease_seconds=60, max_attempts=3), 2)
    assert short_lease["c"].duplicate_ms == 3 * 90_000
    assert (len(short_lease["c"].waits), short_lease["c"].dead) == (3, 1)


def test_lost_worker_is_detected_when_the_simulated_lease_expires() -> None:
    task = SimulatedTask("c", 0, (RecordedAttempt(300_000, lost=True), RecordedAttempt(10)))
    _, busy = simulate_tasks([task], Scenario(lease_seconds=30), 1)
    assert busy == 1.0
    outcome, _ = simulate_tasks([task, SimulatedTask("d", 0, (RecordedAttempt(10),))], Scenario(lease_seconds=30), 1)
    assert outcome["d"].waits == [30_000]


def test_fewer_attempts_cause_dead_letters() -> None:
    task = SimulatedTask("c", 0, (RecordedAttempt(1, failed=True), RecordedAttempt(1, failed=True), RecordedAttempt(1)))
    assert simulate_tasks([task], Scenario(), 1)[0]["c"].dead == 0
    assert simulate_tasks([task], Scenario(max_attempts=2), 1)[0]["c"].dead == 1


def test_unknown_backoff_is_rejected() -> None:
    with pytest.raises(ValueError, match="policy"):
        Backoff.parse("sometimes:3")


def test_peak_concurrency_counts_an_end_before_a_start() -> None:
    assert peak_concurrency(np.array([0, 5, 10]), np.array([10, 10, 20])) == 2
    assert peak_concurrency(np.array([]), np.array([])) == 0


def test_history_is_simulated_per_tenant_and_command(spark: Any) -> None:
    busy = [build_attempt("10:00:10", wait=i, run=10 - i / 100, tenant_id="acme0001") for i in range(4)]
    retry = build_attempt("09:00", run=5, outcome="NACKED", status="PENDING", tenant_id="beta0002")
    again = retry | {
        "number": 2, "outcome": "COMPLETED", "status": "COMPLETED", "visible_at": build_attempt("09:01")["ended_at"],
        "claimed_at": build_attempt("09:01")["ended_at"], "ended_at": build_attempt("09:02")["ended_at"],
    }  # fmt: skip
    history = build_facts(spark, *busy, retry, again)
    unchanged = {row["tenant"]: row for row in simulate.simulate_tenants(history, Scenario()).collect()}
    assert {t: (r["tasks"], r["attempts"], r["workers"]) for t, r in unchanged.items()} == {
        "acme0001": (4, 4, 4), "beta0002": (1, 2, 1),
    }  # fmt: skip
    assert unchanged["beta0002"]["wait_max_ms"] == 0
    one_worker = {row["tenant"]: row for row in simulate.simulate_tenants(history, Scenario(workers=1)).collect()}
    assert one_worker["acme0001"]["wait_max_ms"] > 20_000
    measured = {row["tenant"]: row for row in simulate.measure_tenants(history).collect()}
    assert (measured["acme0001"]["wait_max_ms"], measured["acme0001"]["tasks"]) == (3000, 4)


def test_command_compares_measured_and_simulated_results(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    audit.add([build_attempt("10:00", run=60, command=c) for c in ("render", "render", "mail")])
    run("ingest", "attempts")
    options = type("Options", (), {
        "tenant": "acme0001", "command": [], "since": None, "until": None, "workers": 1, "concurrency": 1,
        "lease": None, "max_attempts": None, "backoff": None, "priority": ["mail=9"],
    })  # fmt: skip
    output: list[str] = []
    cli.run_simulate(spark, lake.url, options, output.append)
    assert [line.split()[:3] for line in output[1:]] == [
        ["acme0001", command, label] for command in ("mail", "render") for label in ("measured", "simulated", "what")
    ]  # fmt: skip
    assert output[0].split()[:3] == ["tenant", "command", "workers"]
