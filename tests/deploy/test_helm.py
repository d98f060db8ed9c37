"""The chart passes helm's linter, and what it renders matches Kubernetes' schemas."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings

CHART = Path(settings.BASE_DIR) / "deploy" / "helm" / "codeq"
# Where `make test-deploy` installs helm and kubernetes-validate.
TOOLS = Path(os.environ.get("CODEQ_TEST_DEPLOY", ""))
VALUES = ("minimal", "full")
# The oldest release that Chart.yaml permits, and the newest one whose schemas are there.
KUBERNETES = ("1.27", "1.37")
# Its schema belongs to the Prometheus operator.
WITHOUT_SCHEMA = {"PodMonitor"}

Resource = dict[str, Any]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / program, *arguments], capture_output=True, text=True, timeout=120, check=False)


def render(values: str, *arguments: str, kubernetes: str = KUBERNETES[-1]) -> list[Resource]:
    file = CHART / "ci" / f"{values}-values.yaml"
    rendered = run("helm", "template", "prod", str(CHART), "-f", str(file), "--kube-version", kubernetes, *arguments)
    assert rendered.returncode == 0, rendered.stderr
    return [resource for resource in yaml.safe_load_all(rendered.stdout) if resource]


def find(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (item for item in resources if (item["kind"], item["metadata"]["name"]) == (kind, name))
    return found


def list_pods(resources: list[Resource]) -> list[Resource]:
    return [item["spec"]["template"]["spec"] for item in resources if item["kind"] in ("Deployment", "Job")]


@pytest.mark.parametrize("values", VALUES)
def test_chart_passes_the_linter(values: str) -> None:
    linted = run("helm", "lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{values}-values.yaml"))
    assert linted.returncode == 0, linted.stdout


def test_chart_without_a_bucket_is_refused() -> None:
    refused = run("helm", "template", "prod", str(CHART), "--kube-version", KUBERNETES[-1])
    assert refused.returncode != 0
    assert "artifacts" in refused.stderr


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_resources_match_the_schemas_of_kubernetes(values: str, kubernetes: str, tmp_path: Path) -> None:
    resources = [item for item in render(values, kubernetes=kubernetes) if item["kind"] not in WITHOUT_SCHEMA]
    file = tmp_path / "resources.yaml"
    file.write_text(yaml.safe_dump_all(resources))
    checked = run("kubernetes-validate", "--strict", "-k", kubernetes, str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert (checked.stdout + checked.stderr).count(" passed ") == len(resources) >= 7


def test_wrong_resource_is_found(tmp_path: Path) -> None:
    service = find(render("minimal"), "Service", "prod-codeq")
    service["spec"]["prts"] = service["spec"].pop("ports")
    file = tmp_path / "resources.yaml"
    file.write_text(yaml.safe_dump(service))
    assert run("kubernetes-validate", "--strict", "-k", KUBERNETES[-1], str(file)).returncode != 0


@pytest.mark.parametrize("values", VALUES)
def test_every_container_is_restricted(values: str) -> None:
    for pod in list_pods(render(values)):
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/var/lib/codeq", "/tmp"}


@pytest.mark.parametrize("values", VALUES)
def test_selectors_match_their_pods(values: str) -> None:
    resources = render(values)
    labels = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in resources
        if item["kind"] == "Deployment"
    }
    for item in resources:
        if item["kind"] in ("Service", "PodDisruptionBudget", "Deployment"):
            selector = item["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            matching = [name for name, own in labels.items() if selector.items() <= own.items()]
            expected = "prod-codeq-web" if item["kind"] == "Service" else item["metadata"]["name"]
            assert matching == [expected]
        elif item["kind"] == "HorizontalPodAutoscaler" and item["spec"]["scaleTargetRef"]["name"] != "greeter":
            assert item["spec"]["scaleTargetRef"]["name"] in labels


def test_web_pod_stops_after_its_proxies_know() -> None:
    pod = find(render("minimal"), "Deployment", "prod-codeq-web")["spec"]["template"]["spec"]
    (web,) = pod["containers"]
    command, seconds = web["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + 4  # GRACE_SECONDS of codeq_site/web.py
    # /readyz would remove all pods while PostgreSQL is away.
    assert {web[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {"/healthz"}


def test_migrations_run_before_the_pods() -> None:
    job = find(render("minimal"), "Job", "prod-codeq-migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    # A hook runs before the other resources exist, so it does not use them.
    text = yaml.safe_dump(job)
    assert "configMap" not in text
    assert "serviceAccountName" not in text


def test_pipeline_has_its_own_image_and_celery_queue() -> None:
    resources = render("full")
    commands = {}
    for name in ("worker", "pipeline"):
        container = find(resources, "Deployment", f"prod-codeq-{name}")["spec"]["template"]["spec"]["containers"][0]
        commands[container["image"].rpartition("/")[2]] = container["command"]
    assert "--queues=celery" in commands["codeq-server:1.2.3"]
    assert "--queues=pipeline" in commands["codeq-pipeline:0.1.0"]
    # Without a pipeline worker, the workers take its messages as well.
    worker = find(render("minimal"), "Deployment", "prod-codeq-worker")["spec"]["template"]["spec"]["containers"][0]
    assert not any(word.startswith("--queues") for word in worker["command"])


def test_queue_depth_scales_workers() -> None:
    scaler = find(render("full"), "HorizontalPodAutoscaler", "prod-codeq-greeter")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"] == {
        "name": "codeq_queue_depth",
        "selector": {"matchLabels": {"command": "greet", "queue": "ready"}},
    }
