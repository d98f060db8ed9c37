"""Hostile payloads on operators' pages: they must not run, send requests, or break a page."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser

from tests.browser.automation import DESKTOP, PHONE, Site, WatchedTab
from tests.browser.conftest import LogIn
from tests.conftest import free_port

# As markup, each part would set `window.hit`, send a request, or hide the page.
EVIL = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><svg onload='window.hit = 3'>"
    "<style>body { display: none }</style></pre></script><a href='javascript:window.hit = 4'>press</a>"
    "<img src='http://203.0.113.7/canary.png'>{{ 7 * 7 }}{% debug %}${window.hit = 5}"
)
# Reversed text, right-to-left text, and a word without a place to break.
ODD = "\u202eesrever\u202c مرحبا بالعالم " + "w" * 400 + "🦆" * 50
TEXT = EVIL + ODD
COMMAND = "c" * 128


@pytest.mark.spec("ADM-2", "Text from producers and workers does not run, send requests, or break a page")
def test_hostile_payloads_do_no_harm(site: Site, log_in: LogIn) -> None:
    tenant = "hostile"
    tid = site.find_tid(tenant)
    payload = {TEXT: TEXT, "__proto__": {"hit": 1}, "</script>": [TEXT, 12345678901234567890]}
    [dead] = site.create_dead_letters(tenant, COMMAND, [payload], TEXT[:900])
    done = site.enqueue(tenant, "done", payload, webhook=f"http://127.0.0.1:{free_port()}/?" + urlencode({"q": EVIL}))
    assert site.claim(tenant, "done")["id"] == done
    artifacts = [{"name": EVIL[:250], "url": "https://files.example.com/" + "p" * 300}]
    body = {"status": "COMPLETED", "result": {"text": TEXT}, "artifacts": artifacts}
    site.call(tenant, "worker", f"tasks/{done}/result", body)
    live = site.enqueue(tenant, "live", payload)
    page = log_in(viewport=PHONE)
    hits = []
    page.on("dialog", lambda dialog: hits.append(dialog.message))
    for path, query in (
        ("", {"tenant": tenant}),
        ("console/queue/", {"tenant": tid, "command": COMMAND}),
        ("console/task/", {"tenant": tid, "id": dead}),
        ("console/task/", {"tenant": tid, "id": done}),
        ("console/task/", {"tenant": tid, "id": live}),
        ("console/tasks/", {"q": EVIL}),
        ("console/tasks/", {"q": "esrever", "tenant": tid}),
        ("console/dead/", {"tenant": tid}),
        ("console/dead/list/", {"tenant": tid, "text": "esrever", "jsonPath": f"$.x == {json.dumps(EVIL)}"}),
        ("console/dead/list/", {"tenant": tid}),
        ("console/bulk/new/", {"tenant": tid, "command": COMMAND}),
        ("queues/auditedresult/", {"tenant": tid}),
        (f"queues/auditedresult/{done}/change/", {}),
        ("queues/attempt/", {"q": dead}),
        ("webhooks/delivery/", {"q": done}),
        ("admin/logentry/", {"q": EVIL}),
    ):
        page.set_viewport_size(PHONE)
        page.goto(f"{site.base}/admin/{path}?{urlencode(query)}")
        page.wait_for_load_state("networkidle") if path else page.wait_for_selector("[data-queue]")
        for size in (PHONE, DESKTOP):
            page.set_viewport_size(size)
            assert page.evaluate("window.hit ?? Object.prototype.hit ?? null") is None, path
            assert page.locator("body").is_visible(), path
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, (path, size)
    page.goto(f"{site.base}/admin/console/task/?{urlencode({'tenant': tid, 'id': dead})}")
    assert EVIL.split("{{")[0] in page.locator(".cq-error").first.inner_text()
    assert "12345678901234567890" in page.get_by_label("Payload").first.inner_text()
    assert hits == []


REPORT_BLOCKED = """async ([to, send]) => {
    const blocked = new Promise(resolve => addEventListener('securitypolicyviolation',
        event => resolve(event.effectiveDirective), {once: true}));
    send === 'image' ? (new Image().src = to) : fetch(to).catch(() => null);
    return await blocked;
}"""


@pytest.mark.parametrize(("send", "blocked"), [("image", "img-src"), ("fetch", "connect-src")])
def test_the_policy_blocks_requests_to_other_hosts(site: Site, chromium: Browser, send: str, blocked: str) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"{site.base}/admin/login/")
        assert page.evaluate(REPORT_BLOCKED, [f"http://127.0.0.1:{free_port()}/canary", send]) == blocked


@pytest.mark.spec("DOC-1", "Swagger UI and ReDoc show the API and load nothing from other hosts")
@pytest.mark.parametrize(("path", "selector"), [("docs", ".opblock-summary-path"), ("redoc", "h2")])
def test_the_api_documentation_loads_from_this_host_only(
    site: Site, chromium: Browser, path: str, selector: str
) -> None:
    with chromium.new_context() as context:
        tab = WatchedTab(context, site.base)
        urls: list[str] = []
        tab.page.on("response", lambda response: urls.append(response.url))
        tab.page.goto(f"{site.base}/api/{path}/")
        tab.page.wait_for_selector(selector)
        assert all(url.startswith((f"{site.base}/", "data:", "blob:")) for url in urls)
        # ReDoc's bundle requests a logo from its maker's host. The policy blocks the request.
        unexpected = [error for error in tab.errors if "redoc.ly" not in error or "Security Policy" not in error]
        assert unexpected == []
