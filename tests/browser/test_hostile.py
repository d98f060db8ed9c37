"""What producers and workers write is looked at by operators: it must not run, reach out, or break a page."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import LogIn
from tests.browser.driving import DESKTOP, PHONE, Site, Watched
from tests.conftest import free_port

# Each would leave its mark on the window, call home, or cover the page, if it were taken for markup.
EVIL = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><svg onload='window.hit = 3'>"
    "<style>body { display: none }</style></pre></script><a href='javascript:window.hit = 4'>press</a>"
    "<img src='http://203.0.113.7/canary.png'>{{ 7 * 7 }}{% debug %}${window.hit = 5}"
)
# Reads backwards, from right to left, and without a place to break.
ODD = "\u202eesrever\u202c مرحبا بالعالم " + "w" * 400 + "🦆" * 50
TEXT = EVIL + ODD
COMMAND = "c" * 128


@pytest.mark.spec("ADM-2", "What producers and workers wrote neither runs, nor reaches out, nor breaks a page")
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_what_others_wrote_does_no_harm(site: Site, log_in: LogIn, size: dict[str, int]) -> None:
    tenant = f"hostile-{size['width']}"
    tid = site.tid(tenant)
    payload = {TEXT: TEXT, "__proto__": {"hit": 1}, "</script>": [TEXT, 12345678901234567890]}
    [dead] = site.die(tenant, COMMAND, [payload], TEXT[:900])
    done = site.enqueue(tenant, "done", payload, webhook=f"http://127.0.0.1:{free_port()}/?" + urlencode({"q": EVIL}))
    assert site.claim(tenant, "done")["id"] == done
    artifacts = [{"name": EVIL[:250], "url": "https://files.example.com/" + "p" * 300}]
    body = {"status": "COMPLETED", "result": {"said": TEXT}, "artifacts": artifacts}
    site.call(tenant, "worker", f"tasks/{done}/result", body)
    live = site.enqueue(tenant, "live", payload)
    page = log_in(viewport=size)
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
        page.goto(f"{site.base}/admin/{path}?{urlencode(query)}")
        page.wait_for_load_state("networkidle") if path else page.wait_for_selector("[data-queue]")
        assert page.evaluate("window.hit ?? Object.prototype.hit ?? null") is None, path
        assert page.locator("body").is_visible(), path
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, path
    page.goto(f"{site.base}/admin/console/task/?{urlencode({'tenant': tid, 'id': dead})}")
    assert EVIL.split("{{")[0] in page.locator(".cq-error").first.inner_text()
    assert "12345678901234567890" in page.get_by_label("Payload").first.inner_text()
    assert hits == []


TELLS = """async ([to, send]) => {
    const refused = new Promise(tell => addEventListener('securitypolicyviolation',
        event => tell(event.effectiveDirective), {once: true}));
    send === 'image' ? (new Image().src = to) : fetch(to).catch(() => null);
    return await refused;
}"""


@pytest.mark.parametrize(("send", "refused"), [("image", "img-src"), ("fetch", "connect-src")])
def test_a_script_that_ran_after_all_would_reach_no_other_host(
    site: Site, chromium: Browser, send: str, refused: str
) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"{site.base}/admin/login/")
        assert page.evaluate(TELLS, [f"http://127.0.0.1:{free_port()}/canary", send]) == refused


@pytest.mark.spec("DOC-1", "Swagger UI and ReDoc show the API, and nothing of another host")
@pytest.mark.parametrize(("path", "shown"), [("docs", ".opblock-summary-path"), ("redoc", "h2")])
def test_the_pages_of_the_api_are_whole(site: Site, chromium: Browser, path: str, shown: str) -> None:
    with chromium.new_context() as context:
        watched = Watched(context, site.base)
        answered: list[str] = []
        watched.page.on("response", lambda answer: answered.append(answer.url))
        watched.page.goto(f"{site.base}/api/{path}/")
        watched.page.wait_for_selector(shown)
        assert all(url.startswith((f"{site.base}/", "data:", "blob:")) for url in answered)
        # ReDoc's bundle asks its maker's host for a logo; the policy does not let it.
        asked = [error for error in watched.errors if "redoc.ly" not in error or "Security Policy" not in error]
        assert asked == []
