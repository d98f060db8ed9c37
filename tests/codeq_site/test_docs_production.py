"""Run the production guide; compare rules, dashboard and runbook with the code."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from django.conf import settings
from django.core.management import get_commands, load_command_class
from django.urls import get_resolver
from prometheus_client import REGISTRY

from codeq_site import env, sockets
from codeq_site.devserver.embedded import DURABLE, PostgreSQL, Valkey
from codeq_site.devserver.supervisor import spawn
from core import metrics
from core.http import router
from tests.codeq_site.installation import clean_environment
from tests.conftest import ValkeyFactory, free_port
from tests.factories import PeriodicTaskRunFactory
from tests.waiting import until

HOWTO = Path(settings.BASE_DIR) / "docs" / "howto"
PAGE = (HOWTO / "production.md").read_text(encoding="utf-8")
RUNBOOK = (HOWTO / "runbook.md").read_text(encoding="utf-8")
RULES = [rule for group in yaml.safe_load((HOWTO / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((HOWTO / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def block(heading: str, language: str = "sh") -> str:
    """Return the first code block of a section."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    code: str = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.M | re.S)[0]
    return code


def server_settings() -> dict[str, str]:
    return dict(shlex.split(line) for line in block("The servers", "conf").splitlines())


def environment() -> dict[str, str]:
    lines = [shlex.split(line, comments=True) for line in block("The settings").splitlines()]
    assert all(words[0] == "export" and len(words) == 2 for words in lines)
    return dict(words[1].split("=", 1) for words in lines)


class Page:
    """Runs the page's commands with its settings, on the tests' servers."""

    def __init__(self, directory: Path, valkey: Valkey, broker: Valkey, database_url: str) -> None:
        self.directory = directory
        self.broker = broker
        self.port = free_port()
        self.variables = {
            **clean_environment(environment()),
            "CODEQ_HOME": str(directory / "home"),
            "CODEQ_PORT": str(self.port),
            "REDIS_URL": valkey.url,
            "CELERY_BROKER_URL": broker.url,
            "DATABASE_URL": database_url,
            "SECRET_KEY": "a-key-that-only-the-tests-use-" + "x" * 32,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def localize(self, line: str) -> str:
        python = shlex.quote(sys.executable)
        line = re.sub(r"\bpython (?=manage|-m)", f"{python} ", line.replace("/var/lib/codeq", str(self.directory)))
        line = line.replace("/run/secrets/codeq_admin", str(self.directory / "password"))
        return re.sub(r"^celery ", f"{python} -W ignore:You.re.running -m celery ", line)

    def run(self, line: str) -> str:
        completed = subprocess.run(
            ["sh", "-euc", self.localize(line)],
            env=self.variables, cwd=settings.BASE_DIR, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert completed.returncode == 0, f"{line}\n{completed.stderr}"
        return completed.stdout.strip()

    def start(self, line: str) -> None:
        argv = shlex.split(self.localize(line))
        log = self.directory / f"process-{len(self.started)}.log"
        self.started.append(
            spawn(argv, log=log, env=self.variables, cwd=settings.BASE_DIR, death_signal=signal.SIGKILL)
        )

    def send(self, method: str, path: str, token: str = "", body: object = None) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


@pytest.fixture
def page(tmp_path: Path, valkey_server: ValkeyFactory, postgresql: PostgreSQL) -> Iterator[Page]:
    config = {name.replace("-", "_"): value for name, value in server_settings().items()}
    servers = valkey_server(**config), valkey_server(**{**config, "appendfsync": "everysec"})
    postgresql.ensure_database("production_page")
    page = Page(tmp_path, *servers, postgresql.url_of("production_page"))
    (tmp_path / "password").write_text("correct horse battery staple\n")
    yield page
    page.end(*page.started)


@pytest.mark.timeout(300)
@pytest.mark.spec(
    "DOC-2", "The processes of docs/howto/production.md, started as described, become ready and complete a task"
)
def test_commands_of_the_page_start_an_installation(page: Page) -> None:
    *preparation, producer, worker, operator = block("The first start").splitlines()
    for line in preparation:
        page.run(line)
    processes = block("The processes").splitlines()
    assert len(processes) == 3
    for line in processes:
        page.start(line)
    until(lambda: sockets.probe("127.0.0.1", page.port, "/readyz")[0] == 200, 60, every=0.05)
    with ThreadPoolExecutor() as pool:
        tokens = list(pool.map(page.run, (producer, worker, operator)))

    tasks = "/v1/codeq/tasks"
    status, task = page.send("POST", tasks, tokens[0], {"command": "greet", "payload": {"whom": "world"}})
    assert status == 202
    status, claimed = page.send("POST", f"{tasks}/claim", tokens[1], {"commands": ["greet"], "waitSeconds": 5})
    assert (status, claimed["id"]) == (200, task["id"])
    page.send("POST", f"{tasks}/{task['id']}/result", tokens[1], {"status": "COMPLETED", "result": {"text": "Hello"}})
    _, read = page.send("GET", f"{tasks}/{task['id']}/result?waitSeconds=5", tokens[0])
    assert read["result"]["result"] == {"text": "Hello"}

    def is_audited() -> bool:
        # Beat has run, a worker has counted the stored row, and this web process exports the count.
        _, shown = page.send("GET", "/metrics", tokens[2])
        wanted = ('codeq_task_completed_total{command="greet",status="COMPLETED"} 1.0', "codeq_audit_lag 0.0")
        return all(line in shown for line in wanted) and 'codeq_beat_late_seconds{name="drain"}' in shown

    until(is_audited, 60, every=0.2)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        page.send("GET", "/metrics")
    # The proxy must forward the host and X-Forwarded-Proto, or the console redirects or refuses.
    assert console_status(page, "codeq.example.com", "https") == 200
    assert console_status(page, "codeq.example.com", "http") == 301
    assert console_status(page, "elsewhere.example.com", "https") == 400

    web, *celery = page.started
    page.end(*celery)
    page.broker.kill()
    assert page.send("POST", tasks, tokens[0], {"command": "greet", "payload": {}})[0] == 202
    page.end(web)
    # A regular stop: after its shutdown uvicorn ends with the signal that it received.
    assert [process.returncode for process in page.started] == [-signal.SIGTERM, 0, 0]


def console_status(page: Page, host: str, scheme: str) -> int:
    """Return the status of the console's login page, requested as by a proxy."""
    link = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    with closing(link):
        link.request("GET", "/admin/login/", headers={"Host": host, "X-Forwarded-Proto": scheme})
        return link.getresponse().status


def test_server_settings_are_those_of_the_tests() -> None:
    assert server_settings() == DURABLE


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\b(?:CODEQ_[A-Z_]+|[A-Z]+_URL|SPARK_MASTER)\b", PAGE + RUNBOOK)))
)
def test_every_named_setting_exists(name: str) -> None:
    assert name in env.names()


def test_every_named_command_and_path_exists() -> None:
    inline = re.findall(r"`manage\.py ([^`]+)`", PAGE)
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.M | re.S)
    pasted = re.findall(r"\bmanage\.py (.+)$", "".join(blocks), flags=re.M)
    assert {"token", "keys rotate", "keys retire KID", "keys list", "secret --tenant acme"} <= {*inline, *pasted}
    for line in {*inline, *pasted}:
        name, *arguments = shlex.split(line)
        command = load_command_class(get_commands()[name], name)
        # A name without arguments is a mention; with arguments it can be pasted.
        if arguments:
            command.create_parser("manage.py", name).parse_args(arguments)
    assert set(re.findall(r"^\| `(/\w+)` \|", PAGE, flags=re.M)) == {"/healthz", "/readyz"} < router.OPERATIONS_PATHS


@pytest.fixture
def exported(valkey: Valkey, transactional_db: None) -> set[str]:
    """All names that /metrics can export, including those of metrics that have no value yet."""
    _ = get_resolver().url_patterns  # as a web process does at its start: the views import their metrics
    PeriodicTaskRunFactory(name="drain")
    registered = {f"{family.name}_total" if family.type == "counter" else family.name for family in REGISTRY.collect()}
    shown = set(re.findall(r"^# TYPE (\w+)", metrics.scrape().decode(), flags=re.M))
    return {name for name in registered | shown if name.startswith("codeq_")}


def test_page_lists_exactly_the_exported_metrics(exported: set[str]) -> None:
    assert set(re.findall(r"`(codeq_(?!site)\w+)`", PAGE)) == exported


# The variables that Grafana replaces in a query.
VARIABLES = {"$__rate_interval": "5m", "$command": ".*"}


def metrics_of(expression: str) -> set[str]:
    """Return the metrics in a PromQL expression. Raises ValueError if it is not valid."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    promql_parser.parse(expression)
    return set(re.findall(r"\b(?:codeq_\w+|up)\b", expression))


@pytest.fixture
def queryable(exported: set[str]) -> set[str]:
    """`exported`, the buckets of histograms, and the metric that Prometheus adds."""
    return exported | {f"{name}_bucket" for name in exported} | {"up"}


def test_invalid_expression_is_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        metrics_of("sum(rate(codeq_task_created_total[$__rate_interval])")


@pytest.mark.spec("OBS-4", "The alert rules are valid PromQL, use exported metrics, and have a summary")
def test_every_rule_uses_exported_metrics(queryable: set[str]) -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert set() < metrics_of(rule["expr"]) <= queryable, rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.spec("OBS-4", "The dashboard's panels are valid PromQL, use exported metrics, and do not overlap")
def test_every_panel_uses_exported_metrics(queryable: set[str]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert cells.isdisjoint(own), panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"]) > 20
    for panel in PANELS:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert set() < metrics_of(target["expr"]) <= queryable, panel["title"]


def test_dashboard_shows_every_metric(exported: set[str]) -> None:
    shown = set().union(*(metrics_of(target["expr"]) for panel in PANELS for target in panel["targets"]))
    assert exported <= {name.removesuffix("_bucket") for name in shown} | {"codeq_depths_complete"}


def test_rules_and_panels_use_labels_of_the_metrics() -> None:
    known = {name for family in REGISTRY.collect() for sample in family.samples for name in sample.labels}
    known |= {"command", "status", "scope", "kind", "outcome", "queue", "name", "job", "code", "le"}
    expressions = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]
    for expression in expressions:
        assert set(re.findall(r"[{,](\w+)!?=", expression)) <= known, expression
        grouped = [names.split(", ") for names in re.findall(r"by \(([\w, ]+)\)", expression)]
        assert {name for names in grouped for name in names} <= known, expression


@pytest.mark.spec("DOC-2", "Each alert has a section in the runbook, and panels name only existing alerts")
def test_runbook_has_a_section_for_each_alert() -> None:
    names = [rule["alert"] for rule in RULES]
    assert re.findall(r"^## (\w+)$", RUNBOOK, flags=re.M) == names
    mentioned = set(re.findall(r"\bCodeq[A-Z]\w+", RUNBOOK + json.dumps(DASHBOARD)))
    assert mentioned <= set(names)
