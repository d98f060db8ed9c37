"""The comparison with other task queues, without the network: `bench.beside`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from bench.beside import __main__ as command
from bench.beside import measure, report
from bench.beside.environments import InstallError
from bench.beside.measure import Sizes, measure_once
from bench.beside.processes import MeasurementError, Producer, cpu_seconds, end_leftovers, running_workers
from bench.beside.stores import ValkeyStore
from bench.beside.systems import ENQUEUE, ENQUEUE_MANY, LATENCY, SYSTEMS, WORK, System
from tests import waiting

SIZES = Sizes(rounds=2, seconds=0.3, latency_tasks=3)
# A queue that is a list in Valkey, with the modes that a driver has.
LIST_QUEUE = """
import json, redis, driver
client = redis.Redis.from_url(driver.STORE)
push = lambda payload: client.lpush("list", json.dumps(payload))
push_many = lambda payloads: client.lpush("list", *map(json.dumps, payloads))
if driver.is_worker():
    while True:
        if item := client.brpop("list", 1):
            driver.handle(json.loads(item[1]))
driver.serve(driver.answer_with(push, push_many), ["redis"])
"""
# A worker with a child.
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"


def make_results(**changes: object) -> report.Results:
    figures = {
        LATENCY: {"p50_ms": 1.5, "p99_ms": 2.5},
        ENQUEUE: {"per_second": 1000.0, "cpu_us": 300.0},
        ENQUEUE_MANY: {"per_second": 20000.0, "cpu_us": 30.0},
        WORK: {"per_second": 500.0, "cpu_us": 900.0},
    }
    measurements = []
    for number in (1, 2, 3):
        for system in SYSTEMS:
            own = {name: {k: v * number for k, v in values.items()} for name, values in figures.items()}
            own = {name: own[name] for name in system.operations}
            measurements.append({"round": number, "system": system.key, "load": 1.0 + number, "figures": own})
    results = {
        "date": "2026-01-02",
        "cores": 2,
        "sizes": {"rounds": 3, "seconds": 6.0, "latency_tasks": 100},
        "versions": {system.key: {"valkey": "9.1.2", system.key: "1.2.3"} for system in SYSTEMS},
        "failures": {},
        "measurements": measurements,
    }
    return results | changes


def make_system(driver: Path, **changes: object) -> System:
    values = {
        "key": "list", "name": "List", "description": "a list", "install": lambda cache: Path(sys.executable),
        "driver": str(driver), "store": ValkeyStore, "waiting": ("list",),
    }  # fmt: skip
    return System(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def list_queue(tmp_path: Path) -> System:
    driver = tmp_path / "list_queue.py"
    driver.write_text(LIST_QUEUE)
    return make_system(driver)


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """A function that returns the child processes that the test has started and that still run."""
    former = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in former]


# The report


def test_the_table_has_the_median_and_the_spread_of_each_system() -> None:
    section = report.build_section(make_results())
    rows = [line for line in section.splitlines() if line.startswith("| Celery |")]
    assert rows[0] == (
        "| Celery | 1,000 (500–1,500) | 1,800 (900–2,700) | 2,000 (1,000–3,000) | 600 (300–900) | – | – "
        "| 3.0 (1.5–4.5) | 5.0 (2.5–7.5) |"
    )
    assert rows[1].endswith("| valkey 9.1.2, celery 1.2.3 |")
    assert "load average was 2.0 to 4.0" in section
    assert "Not measured" not in section


def test_a_system_without_figures_is_named_with_the_reason() -> None:
    results = make_results(failures={"BullMQ": "cannot be installed: npm ended with exit code 1"})
    results["measurements"] = [entry for entry in results["measurements"] if entry["system"] != "bullmq"]
    section = report.build_section(results)
    assert "| BullMQ |" not in section
    assert "Not measured, or not in every round: BullMQ: cannot be installed: npm ended with exit code 1" in section


def test_only_the_text_between_the_markers_is_replaced() -> None:
    page = f"# Title\n\n{report.START}\nold\n{report.END}\n\n## By hand\n"
    replaced = report.replace_section(page, "new")
    assert replaced == f"# Title\n\n{report.START}\nnew\n{report.END}\n\n## By hand\n"
    assert report.replace_section(replaced, "new") == replaced


def test_a_page_without_markers_is_not_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="has no <!-- make bench: start -->"):
        report.write(make_results(), page, tmp_path)
    assert page.read_text() == "# Title\n"


def test_each_picture_is_an_svg_for_light_and_dark_pages(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{report.START}\n{report.END}\n")
    files = report.write(make_results(), page, tmp_path)
    for file in files[1:]:
        text = file.read_text()
        names = {element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
        assert {"Celery", "codeQ, codeq_client"} <= names
        assert "prefers-color-scheme: dark" in text
        assert len(text) < 20_000


def test_the_page_and_the_pictures_are_those_of_the_stored_results() -> None:
    """`python -m bench.beside.report` writes them again."""
    results = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.replace_section(page, report.build_section(results)) == page
    for name, panels in report.PICTURES.items():
        assert (report.IMAGES / name).read_text(encoding="utf-8") == report.build_svg(results, panels)


# The processes


def test_workers_and_their_children_end_with_the_block(
    tmp_path: Path, started: Callable[[], list[psutil.Process]]
) -> None:
    with running_workers([sys.executable, "-c", PARENT], 2, {}, tmp_path / "log") as workers:
        waiting.until(lambda: all(process.children() for process in started()))
        running = [member for process in started() for member in (process, *process.children())]
        assert len(running) == 4
        assert cpu_seconds(workers.pids()) > 0
        workers.check()
    _, still_running = psutil.wait_procs(running, timeout=10)
    assert still_running == []


def test_a_worker_that_has_ended_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = [sys.executable, "-c", "import sys; sys.exit('broken settings')"]
    with running_workers(argv, 1, {}, log) as workers:
        workers.processes[0].wait(30)
        with pytest.raises(MeasurementError, match="a worker ended") as error:
            workers.check()
    assert error.value.detail == "broken settings"


def test_a_producer_that_ends_or_is_silent_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(MeasurementError, match="the producer ended"):
        Producer([sys.executable, "-c", "raise SystemExit('no store')"], {}, log)
    with pytest.raises(MeasurementError, match="the producer did not answer"):
        Producer([sys.executable, "-c", "import time; time.sleep(60)"], {}, log, start_seconds=0.2)
    assert "no store" in log.read_text()


def test_workers_of_a_killed_comparison_are_ended(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        running_workers(sleep, 1, {"BENCH_DELAYS": str(tmp_path / "run" / "delays")}, tmp_path / "log") as leftover,
        running_workers(sleep, 1, {"BENCH_DELAYS": str(tmp_path / "other" / "delays")}, tmp_path / "log") as other,
    ):
        end_leftovers(tmp_path / "run")
        leftover.processes[0].wait(10)
        other.check()


def test_cpu_of_children_that_have_ended_is_counted() -> None:
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); input()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE) as process:
        waiting.until(lambda: psutil.Process(process.pid).cpu_times().children_user > 0.05, seconds=60)
        assert cpu_seconds([process.pid]) > 0.05
        process.communicate(b"\n")


# A measurement


def test_a_system_is_measured_on_a_store_of_its_own(
    list_queue: System, tmp_path: Path, started: Callable[[], list[psutil.Process]]
) -> None:
    steps: list[str] = []
    figures, versions = measure_once(list_queue, Path(sys.executable), tmp_path / "run", SIZES, steps.append)
    assert steps == ["starting", LATENCY, ENQUEUE, ENQUEUE_MANY, WORK]
    assert set(figures) == {LATENCY, ENQUEUE, ENQUEUE_MANY, WORK}
    assert all(figures[operation]["per_second"] > 0 for operation in (ENQUEUE, ENQUEUE_MANY, WORK))
    assert 0 < figures[LATENCY]["p50_ms"] <= figures[LATENCY]["p99_ms"]
    assert set(versions) == {"valkey", "redis"}
    assert not (tmp_path / "run").exists()
    assert started() == []


def test_an_interrupt_ends_all_processes(
    list_queue: System,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Callable[[], list[psutil.Process]],
) -> None:
    """Ctrl-C arrives while store, producer and worker run."""
    running: list[psutil.Process] = []

    def interrupt(*arguments: object) -> list[float]:
        running.extend(started())
        raise KeyboardInterrupt

    monkeypatch.setattr(measure._Measurement, "_send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_once(list_queue, Path(sys.executable), tmp_path / "run", SIZES, lambda step: None)
    assert len(running) == 3
    _, still_running = psutil.wait_procs(running, timeout=10)
    assert still_running == []


# The command


def test_two_comparisons_do_not_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["beside", "--cache", str(tmp_path)])
    with command._lock(tmp_path), pytest.raises(SystemExit, match="Another comparison runs"):
        command.main()


def fail_to_install(cache: Path) -> Path:
    raise InstallError("npm ended with exit code 1", "a host and a path")


def test_a_system_that_cannot_be_installed_does_not_stop_the_others(
    list_queue: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_system(tmp_path, key="broken", name="Broken", install=fail_to_install)
    monkeypatch.setattr(command, "select_systems", lambda keys: [broken, list_queue])
    monkeypatch.setattr(command, "measure_once", lambda *arguments: ({ENQUEUE: {"per_second": 1.0}}, {}))
    monkeypatch.setattr(sys, "argv", ["beside", "--systems", "broken,list", "--cache", str(tmp_path)])
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    assert command.main() == 1
    printed = capsys.readouterr()
    assert "Broken: cannot be installed: npm ended with exit code 1" in printed.out
    assert "a host and a path" not in printed.out
    assert "a host and a path" in printed.err


def test_an_interrupted_run_is_continued(list_queue: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(["measured", "interrupted", "measured"])

    def measure_or_interrupt(*arguments: object) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        if next(outcomes) == "interrupted":
            raise KeyboardInterrupt
        return {ENQUEUE: {"per_second": 5.0}}, {"redis": "1"}

    monkeypatch.setattr(command, "measure_once", measure_or_interrupt)
    first = command.Comparison(SIZES, [list_queue], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = command.Comparison(SIZES, [list_queue], tmp_path)
    second.continue_unfinished()
    assert len(second.results["measurements"]) == 1
    second.run()
    second.finish()
    assert [entry["round"] for entry in second.results["measurements"]] == [1, 2]
    assert list(tmp_path.glob("unfinished*")) == []


@pytest.mark.parametrize("changed", ["code", "sizes", "systems"])
def test_a_run_of_other_code_or_with_other_sizes_is_not_continued(
    list_queue: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(command, "measure_once", lambda *arguments: ({ENQUEUE: {"per_second": 5.0}}, {}))
    command.Comparison(SIZES, [list_queue], tmp_path).run()
    if changed == "code":
        monkeypatch.setattr(command, "_source_digest", lambda: "another")
    sizes = SIZES._replace(rounds=3) if changed == "sizes" else SIZES
    systems = [list_queue, *SYSTEMS[:1]] if changed == "systems" else [list_queue]
    second = command.Comparison(sizes, systems, tmp_path)
    second.continue_unfinished()
    assert second.results["measurements"] == []


def test_the_next_run_measures_only_the_system_that_failed(
    list_queue: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure_or_fail(system: System, *arguments: object) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        measured.append(system.key)
        if measured.count("flaky") == 1 and system.key == "flaky":
            raise ConnectionError("the store ended")
        return {ENQUEUE: {"per_second": 5.0}}, {}

    monkeypatch.setattr(command, "measure_once", measure_or_fail)
    systems = [list_queue, make_system(tmp_path, key="flaky", name="Flaky")]
    first = command.Comparison(SIZES, systems, tmp_path)
    first.run()
    first.finish()
    assert first.results["failures"] == {"Flaky": "round 1: its store failed"}
    second = command.Comparison(SIZES, systems, tmp_path)
    second.continue_unfinished()
    second.run()
    assert measured == ["list", "flaky", "list", "flaky", "flaky"]
    assert second.results["failures"] == {}
