"""The nginx sample: web processes restart under load, and no request fails."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from django.conf import settings

from codeq_site.devserver.supervisor import spawn
from tenants import services
from tenants.auth import installation_keys as signing
from tenants.cache import tenant_cache
from tenants.domain import CallerRole
from tests.conftest import free_port
from tests.faults.deployment import Deployment, get_database_url, kill
from tests.faults.load import Load
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
SAMPLE = Path(settings.BASE_DIR) / "deploy" / "nginx" / "codeq.conf"
NGINX_CONF = """\
daemon off;
{user}worker_processes 2;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/codeq.conf;
}}
"""
# Processes of root would run as another user, who cannot write to the temporary directory.
USER = "user root;\n" if os.geteuid() == 0 else ""
ROUNDS = 3


def make_certificate(directory: Path) -> ssl.SSLContext:
    """Write a certificate for 127.0.0.1, and return a context of clients that trust it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "codeq.example.com")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "codeq.crt").write_bytes(certificate.public_bytes(pem))
    (directory / "codeq.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return ssl.create_default_context(cafile=str(directory / "codeq.crt"))


class Site:
    """nginx with the sample, and the two web processes that it names."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.tls = make_certificate(directory)
        production = {"CODEQ_PRODUCTION": "true", "CODEQ_ALLOWED_HOSTS": "127.0.0.1"}
        self.webs = [Deployment(directory, get_database_url(), **production) for _ in range(2)]
        self.directory = directory
        self.write_configuration()
        self.nginx = spawn(
            [find_nginx(), "-p", str(directory), "-c", str(directory / "nginx.conf")],
            log=directory / "nginx.log",
            env={},
            cwd=directory,
            death_signal=signal.SIGKILL,
        )

    def write_configuration(self) -> None:
        changes = {
            "127.0.0.1:8081": f"127.0.0.1:{self.webs[0].port}",
            "127.0.0.1:8082": f"127.0.0.1:{self.webs[1].port}",
            "listen 443": f"listen 127.0.0.1:{self.port}",
            "/etc/nginx/codeq": f"{self.directory}/codeq",
        }
        sample = SAMPLE.read_text(encoding="utf-8")
        for text, replacement in changes.items():
            assert text in sample
            sample = sample.replace(text, replacement)
        (self.directory / "codeq.conf").write_text(sample)
        (self.directory / "nginx.conf").write_text(NGINX_CONF.format(directory=self.directory, user=USER))

    def start_web(self, number: int) -> None:
        web = self.webs[number]
        process = web.web()
        web.wait_until_it_accepts_connections([process])

    def restart_web(self, number: int) -> None:
        process = self.webs[number].processes[-1]
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
        self.start_web(number)

    def status(self, path: str) -> int:
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", headers={"X-Forwarded-Proto": "http"})
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.tls) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def close(self) -> None:
        kill(self.nginx)
        for web in self.webs:
            web.close()


def find_nginx() -> str:
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    assert program, "Install nginx (on Debian: apt-get install nginx-light)."
    return program


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    signing.own_keys.forget()
    site = Site(tmp_path)
    yield site
    site.close()
    signing.own_keys.forget()
    tenant_cache.stop()


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_nginx_accepts_the_sample(site: Site) -> None:
    command = [find_nginx(), "-t", "-q", "-p", str(site.directory), "-c", str(site.directory / "nginx.conf")]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (tested.returncode, tested.stderr) == (0, "")


@pytest.mark.real_time
@pytest.mark.timeout(300)
def test_rolling_restart_fails_no_request(site: Site) -> None:
    services.create_tenant("north")
    producer = [services.issue_token("north", CallerRole.PRODUCER) for _ in range(3)]
    worker = [services.issue_token("north", CallerRole.WORKER, subject="w") for _ in range(3)]
    for number in range(2):
        site.start_web(number)
    until(lambda: is_listening(site.port), 10, every=0.05)
    # The console neither redirects endlessly nor refuses the host.
    assert site.status("/admin/login/") == 200

    with Load(site.port, producer, worker, tls=site.tls) as load:
        for _ in range(ROUNDS):
            for number in range(2):
                time.sleep(1)
                site.restart_web(number)
        time.sleep(1)
    statuses = Counter(record.status for record in load.records)
    print(f"{len(load.records)} requests, {2 * ROUNDS} restarts, {dict(statuses)}")
    errors = (site.directory / "error.log").read_text()
    assert {status for status in statuses if not 200 <= status < 300} == set(), errors[-3000:]
    assert len(load.records) > 500
    assert sorted(load.completed) == sorted(load.created)
