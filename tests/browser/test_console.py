"""The console in a real browser: live pages, actions, permissions, keyboard."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.browser.automation import PHONE, Site
from tests.browser.conftest import LogIn
from tests.conftest import free_port
from tests.waiting import until

CANARY = "kanarie"


@pytest.fixture(scope="package")
def acme(site: Site) -> str:
    return site.find_tid("acme")


def open_page(page: Page, path: str, **query: str) -> None:
    page.goto(f"{page.url.split('/admin/')[0]}/admin/{path}?{urlencode(query)}")


def submit_dialog(page: Page, dialog: str, reason: str) -> None:
    """Enter the reason in an action's dialog and submit it."""
    box = page.locator(f"dialog#{dialog}")
    box.locator("input[name=reason]").fill(reason)
    box.locator("button[type=submit]").click()


# --- live ---


@pytest.mark.spec("ADM-3", "The overview updates without a reload")
def test_the_overview_updates_live(site: Site, log_in: LogIn) -> None:
    page = log_in()
    page.evaluate("window.isSameDocument = true")
    row = page.locator("[data-queue='acme/live']")
    expect(row).to_have_count(0)
    for _ in range(3):
        site.enqueue("acme", "live", {})
    ready, in_progress = (row.locator(f"[data-label='{name}']") for name in ("Ready", "In progress"))
    expect(ready).to_have_text("3")
    site.claim("acme", "live")
    expect(in_progress).to_have_text("1")
    expect(ready).to_have_text("2")
    assert page.evaluate("window.isSameDocument")
    for name in ("Beat", "Audit", "Deliveries", "Memory", "Durability"):
        expect(page.locator(".cq-checks")).to_contain_text(name)


def test_the_root_url_redirects_to_the_console(site: Site, log_in: LogIn) -> None:
    page = log_in()
    page.goto(f"{site.base}/")
    expect(page).to_have_url(f"{site.base}/admin/")


@pytest.mark.spec("ADM-3", "A failed health check stands out on the overview and links to the details")
def test_a_failed_health_check_stands_out_and_links_to_the_details(site: Site, log_in: LogIn) -> None:
    rows = "from queues.models import Quarantine; from tests.factories import QuarantineFactory; "
    create = rows + "QuarantineFactory(reason='unreadable entry')"
    site.shell(create)
    try:
        page = log_in()
        failed = page.locator(".cq-checks [data-well=false]")
        expect(failed.get_by_text("1 could not be stored")).to_be_visible()
        colour = failed.get_by_text("1 could not be stored").evaluate("element => getComputedStyle(element).color")
        assert colour == "rgb(185, 28, 28)"
        failed.get_by_role("link", name="Quarantine").click()
        expect(page.get_by_text("unreadable entry")).to_be_visible()
    finally:
        site.shell(f"{rows}Quarantine.objects.all().delete()")


@pytest.mark.spec("ADM-3", "The overview can be filtered and sorted; its totals follow the filters")
def test_the_overview_is_filtered_and_sorted(site: Site, log_in: LogIn) -> None:
    for command, count in (("sieve.a", 2), ("sieve.b", 5), ("sieve.c", 1)):
        for _ in range(count):
            site.enqueue("sifted", command, {})
    site.create_dead_letters("sifted", "sieve.d", [{}], "no disk")
    page = log_in()
    rows, total = page.locator("tr[data-queue]"), page.locator("[data-total=ready]")
    page.get_by_label("Tenant").fill("sift")
    expect(rows).to_have_count(4)
    expect(total).to_have_text("8")
    page.get_by_role("button", name="Ready", exact=True).click()
    expect(rows.first).to_contain_text("sieve.b")
    page.get_by_label("Queue", exact=True).fill("e.c")
    expect(rows).to_have_count(1)
    expect(total).to_have_text("1")
    page.get_by_label("Queue", exact=True).fill("")
    page.get_by_label("Show").select_option("with dead letters")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("sieve.d")
    page.get_by_label("Show").select_option("paused")
    expect(page.get_by_text("No queues match the filters.")).to_be_visible()


def test_a_hidden_page_sends_no_requests(log_in: LogIn) -> None:
    page = log_in()
    page.clock.install()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url) if "overview.json" in request.url else None)
    page.reload()
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.clock.run_for(60_000)
    assert requests == []
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: false, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    with page.expect_response(lambda response: "overview.json" in response.url):
        page.clock.run_for(10)


@pytest.mark.spec("ADM-3", "A queue's page has charts, next tasks, and tasks in progress with their workers")
def test_a_queue_has_charts_and_lists(site: Site, log_in: LogIn, acme: str) -> None:
    first, second = site.enqueue("acme", "charted", {"n": 1}, priority=9), site.enqueue("acme", "charted", {"n": 2})
    site.claim("acme", "charted")
    page = log_in()
    open_page(page, "console/queue/", tenant=acme, command="charted")
    expect(page.get_by_role("region", name="In progress")).to_contain_text(first)
    expect(page.get_by_role("region", name="Next tasks")).to_contain_text(second)
    page.wait_for_function("[...document.querySelectorAll('canvas')].every((canvas) => Chart.getChart(canvas))")
    for span, steps in (("24 hours", 96), ("7 days", 84), ("1 hour", 60)):
        page.get_by_text(span, exact=True).click()
        page.wait_for_function(f"Chart.getChart(document.querySelector('canvas')).data.labels.length === {steps}")
    page.get_by_role("link", name="acme", exact=True).click()
    expect(page.get_by_label("Tenant")).to_have_value("acme")
    expect(page.locator("[data-queue='acme/charted']")).to_be_visible()


@pytest.mark.spec("ADM-1", "A queue's policy can be set in the console and takes effect")
def test_a_policy_is_set_and_takes_effect(site: Site, log_in: LogIn, acme: str) -> None:
    for number in range(2):
        site.enqueue("acme", "ruled", {"n": number})
    page = log_in()
    open_page(page, "console/queue/", tenant=acme, command="ruled")
    policy = page.get_by_role("region", name="Policy")
    expect(policy).to_contain_text("not set: the defaults apply")
    policy.get_by_role("button", name="Edit policy").click()
    form = page.locator("dialog#policy")
    form.get_by_label("Maximum tasks in progress").fill("1")
    form.get_by_label("Reason").fill("the printer has one tray")
    form.get_by_role("button", name="Save policy").click()
    expect(page.get_by_text("Policy saved as version 1.")).to_be_visible()
    expect(policy).to_contain_text("version 1, by admin")
    site.claim("acme", "ruled")
    waiting = page.get_by_role("region", name="Next tasks").get_by_role("link").first
    expect(page.get_by_role("region", name="In progress").get_by_role("link")).to_have_count(1)
    waiting.click()
    expect(page.locator(".cq-summary")).to_contain_text("as its policy allows (1)")


@pytest.mark.spec("ADM-3", "A task is found by id, idempotency key, worker or text, live or ended")
def test_a_task_is_found_by_id_key_or_text(site: Site, log_in: LogIn) -> None:
    [dead] = site.create_dead_letters("acme", "sought", [{"customer": "wintermute"}], "no such customer")
    live = site.enqueue("acme", "sought", {"n": 1}, idempotencyKey="order-4711")
    page = log_in()
    page.locator("#nav-sidebar-apps").get_by_role("link", name="search Tasks").click()
    for term, task_id in (("order-4711", live), ("wintermute", dead), ("no such customer", dead)):
        page.get_by_label("Search term").fill(term)
        page.keyboard.press("Enter")
        expect(page.locator("tbody th")).to_contain_text(task_id)
    for task_id in (live, dead):
        page.locator("#nav-sidebar-apps").get_by_role("link", name="search Tasks").click()
        page.get_by_label("Search term").fill(task_id)
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(f"/console/task/.*{task_id}"))


# --- a poison task, from its failure to its completion ---


@pytest.mark.spec("ADM-2", "A dead letter can be found, inspected, edited, replayed and completed")
def test_a_poison_task_is_edited_and_replayed(site: Site, log_in: LogIn) -> None:
    [task_id] = site.create_dead_letters(
        "acme", "charge", [{"amount": -5, "note": "<b>bold</b>"}], "negative amount -5"
    )
    page = log_in()
    page.get_by_role("link", name="Dead letters").click()
    expect(page.get_by_role("link", name="acme · charge")).to_be_visible()
    page.get_by_role("link", name="acme · charge").click()
    page.get_by_role("link", name=task_id).click()
    expect(page.locator(".cq-summary")).to_contain_text("Dead letter: 1 of 1 attempts failed")
    expect(page.get_by_label("Payload").first).to_contain_text('"note": "<b>bold</b>"')
    expect(page.locator(".cq-timeline")).to_contain_text("negative amount -5")

    page.get_by_role("button", name="Edit and replay").click()
    editor = page.locator("dialog[open]")
    editor.locator("textarea").fill('{"amount": 5')
    editor.locator("input[name=reason]").fill("the sign was wrong")
    editor.get_by_role("button", name="Replay task").click()
    expect(editor.get_by_role("alert")).to_contain_text("The payload is not valid JSON")
    editor.locator("textarea").fill('{"amount": 5.00}')
    editor.get_by_role("button", name="Replay task").click()
    expect(page.get_by_text("Task replayed. It is in the queue again.")).to_be_visible()
    expect(page.locator(".cq-summary")).to_contain_text("Next: the first worker")

    task = site.claim("acme", "charge")
    assert (task["id"], task["payload"]) == (task_id, '{"amount":5.00}')
    page.reload()
    expect(page.locator(".cq-summary")).to_contain_text("Running: worker works on it")
    site.complete("acme", task_id, {"charged": True})
    page.reload()
    expect(page.locator(".cq-summary")).to_contain_text("COMPLETED")
    expect(page.get_by_label("Result")).to_contain_text('"charged": true')


def test_copying_copies_the_payload(site: Site, log_in: LogIn, acme: str) -> None:
    task_id = site.enqueue("acme", "copied", {"big": 12345678901234567890})
    page = log_in(permissions=["clipboard-read", "clipboard-write"])
    open_page(page, "console/task/", tenant=acme, id=task_id)
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == '{\n  "big": 12345678901234567890\n}'


# --- bulk jobs ---


@pytest.mark.spec("ADM-2", "A bulk job replays all matching: dry run, progress, cancellation, continuation")
def test_a_bulk_replay_has_a_dry_run_progress_and_cancellation(site: Site, log_in: LogIn, acme: str) -> None:
    site.create_dead_letters("acme", "bulky", [{"n": n} for n in range(60)], "no disk")
    page = log_in()
    open_page(page, "console/dead/list/", tenant=acme, command="bulky")
    expect(page.locator(".cq-note").first).to_contain_text("60 dead letters")
    page.get_by_role("link", name="Replay all matching").click()
    expect(page.locator("[data-dry-run=count]")).to_have_text("60")
    assert page.locator("tbody tr").count() == 10
    page.get_by_label("Maximum rate").fill("2")  # half a minute, enough time to cancel it
    page.get_by_label("Reason").fill("the disk is back")
    page.get_by_role("button", name="Replay 60").click()

    done = page.locator("[data-count=Done]")
    expect(done).not_to_have_text("0")
    bar = page.get_by_role("progressbar")
    expect(bar).to_have_attribute("aria-valuemax", "60")
    page.get_by_role("button", name="Cancel job").click()
    submit_dialog(page, "cancel", "too early")
    expect(page.locator("[data-state]")).to_contain_text("cancelled")
    processed = int(bar.get_attribute("aria-valuenow") or 0)
    assert 0 < processed < 60

    left = 60 - processed
    until(lambda: len(site.list_dead_letters("acme", "bulky")) == left)  # the drain updates the list
    open_page(page, "console/dead/list/", tenant=acme, command="bulky")
    expect(page.locator(".cq-note").first).to_contain_text(f"{left} dead letters")
    page.get_by_role("link", name="Replay all matching").click()
    page.get_by_label("Reason").fill("now")
    page.get_by_role("button", name=f"Replay {left}").click()
    expect(page.locator("[data-state]")).to_contain_text("done")
    expect(done).to_have_text(str(left))
    page.get_by_role("link", name="Bulk jobs").first.click()
    expect(page.locator("tbody tr")).to_have_count(2)


@pytest.mark.spec("ADM-2", "A bulk replay can be undone on its page, with a reason")
def test_a_bulk_replay_is_undone(site: Site, log_in: LogIn, acme: str) -> None:
    site.create_dead_letters("acme", "undone", [{"n": n} for n in range(4)], "no disk")
    page = log_in()
    open_page(page, "console/bulk/new/", tenant=acme, command="undone")
    page.get_by_label("Reason").fill("the disk is back")
    page.get_by_role("button", name="Replay 4").click()
    undo = page.get_by_role("button", name="Undo replay")
    expect(undo.first).to_be_visible()  # without a reload, when the job is over
    claimed = site.claim("acme", "undone")["id"]
    undo.first.click()
    submit_dialog(page, "recall", "it is not, after all")
    expect(page.get_by_role("heading", name="Undo of a replay")).to_be_visible()
    expect(page.locator("[data-count=Done]")).to_have_text("3")
    until(lambda: len(site.list_dead_letters("acme", "undone")) == 3)
    assert claimed not in site.list_dead_letters("acme", "undone")
    page.get_by_role("link", name="a replay", exact=True).click()
    expect(page.get_by_role("link", name="by admin")).to_be_visible()
    expect(undo).to_have_count(0)
    open_page(page, "admin/logentry/")
    expect(page.locator("#result_list")).to_contain_text("it is not, after all")


@pytest.mark.spec("ADM-2", "Canaries are replayed first; if too many fail, the job stops")
def test_a_bulk_replay_stops_if_its_canaries_fail(site: Site, log_in: LogIn, acme: str) -> None:
    site.create_dead_letters("acme", "risky", [{"n": n} for n in range(12)], "no disk")
    page = log_in()
    open_page(page, "console/bulk/new/", tenant=acme, command="risky")
    page.get_by_label("Number of canaries").fill("2")
    page.get_by_label("Maximum failed canaries").fill("0")
    page.get_by_label("Observation time").fill("60")
    page.get_by_label("Reason").fill("perhaps")
    page.get_by_role("button", name="Replay 12").click()
    expect(page.locator("[data-state]")).to_contain_text("watching the canaries")
    task = site.claim("acme", "risky")
    site.call("acme", "worker", f"tasks/{task['id']}/nack", {"reason": "still no disk"})
    expect(page.locator("[data-state]")).to_contain_text("stopped: too many canaries died")
    expect(page.locator("[data-count='Failed canaries']")).to_have_text("1")
    expect(page.locator("[data-count=Done]")).to_have_text("2")
    until(lambda: len(site.list_dead_letters("acme", "risky")) == 11)


@pytest.mark.spec("ADM-2", "All matching dead letters can be exported with complete payloads")
def test_dead_letters_are_exported_as_files(site: Site, log_in: LogIn, acme: str) -> None:
    ids = site.create_dead_letters("acme", "kept", [{"n": n, "long": "x" * 1000} for n in range(3)], "no disk")
    page = log_in()
    open_page(page, "console/dead/list/", tenant=acme, command="kept")
    for name, file in (("CSV", "dead-letters.csv"), ("JSON Lines", "dead-letters.jsonl")):
        with page.expect_download() as download:
            page.get_by_role("link", name=f"Export as {name}", exact=True).click()
        assert download.value.suggested_filename == file
        text = download.value.path().read_text()
        assert all(task_id in text for task_id in ids)
        assert text.count("x" * 1000) == 3


@pytest.mark.spec("ADM-2", "Selected dead letters are replayed or deleted")
def test_selected_dead_letters_are_replayed_and_deleted(site: Site, log_in: LogIn, acme: str) -> None:
    ids = site.create_dead_letters("acme", "picked", [{"n": n} for n in range(3)], "no disk")
    page = log_in()
    open_page(page, "console/dead/list/", tenant=acme, command="picked")
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.get_by_role("button", name="Replay selected")).to_be_disabled()
    page.get_by_label(f"Select {ids[0]}").check()
    page.get_by_role("button", name="Replay selected").click()
    submit_dialog(page, "replay", "once more")
    expect(page.get_by_text("1 replayed")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Delete selected").click()
    submit_dialog(page, "delete", "not needed")
    expect(page.get_by_text("2 deleted")).to_be_visible()
    expect(page.get_by_text("No dead letters match the filters.")).to_be_visible()


# --- permissions ---


@pytest.mark.spec("ADM-4", "A viewer's pages have no actions, and the server rejects them")
def test_a_viewer_cannot_act(site: Site, log_in: LogIn, acme: str) -> None:
    [task_id] = site.create_dead_letters("acme", "seen", [{"n": 1}], "no disk")
    page = log_in(site.create_user("vera", "acme", "viewer"))
    for path, query in (
        ("console/queue/", {"tenant": acme, "command": "seen"}),
        ("console/task/", {"tenant": acme, "id": task_id}),
        ("console/dead/list/", {"tenant": acme}),
    ):
        open_page(page, path, **query)
        assert page.locator("#main form[method=post]").count() == 0
        assert page.locator("#main dialog").count() == 0
    token = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}.get("csrftoken", "")
    response = page.request.post(
        f"{site.base}/admin/console/task/delete/",
        form={"tenant": acme, "id": task_id, "reason": "x", "csrfmiddlewaretoken": token},
        headers={"Referer": f"{site.base}/admin/"},
    )
    assert response.status == 403
    open_page(page, "console/task/", tenant=acme, id=task_id)
    expect(page.locator(".cq-summary")).to_contain_text("Dead letter")


@pytest.mark.spec("ADM-4", "Staff of a tenant see nothing of another tenant on any page of the console")
def test_staff_see_nothing_of_another_tenant(site: Site, log_in: LogIn) -> None:
    site.create_dead_letters(CANARY, f"{CANARY}.send", [{CANARY: 1}], f"{CANARY} error")
    site.enqueue(CANARY, f"{CANARY}.send", {CANARY: 2}, webhook=f"http://127.0.0.1:{free_port()}/{CANARY}")
    site.enqueue("north", "own", {})
    page = log_in(site.create_user("nora", "north", "operator"))
    expect(page.locator("[data-queue='north/own']")).to_be_visible()
    links = page.locator("#nav-sidebar-apps a").evaluate_all("links => links.map((link) => link.href)")
    assert len(links) > 10
    foreign = {"tenant": site.find_tid(CANARY), "command": f"{CANARY}.send"}
    for link in [f"{site.base}/admin/", *links]:
        page.goto(link)
        assert CANARY not in page.content(), link
    for path in ("console/queue/", "console/dead/", "console/dead/list/"):
        response = page.request.get(f"{site.base}/admin/{path}?{urlencode(foreign)}")
        assert response.status == 404
    # The superuser sees the canary, so the pages above could have shown it.
    assert CANARY in log_in().content()


@pytest.mark.spec("ADM-4", "A new signing secret is shown once, in the dialog, and is masked afterwards")
def test_a_signing_secret_is_shown_once(log_in: LogIn, acme: str) -> None:
    page = log_in()
    open_page(page, f"tenants/tenant/{acme}/change/")
    page.get_by_text("Create signing secret").first.click()
    dialog = page.locator("#modal-content")
    dialog.get_by_label("Reason").fill("the old one leaked")
    dialog.get_by_role("button", name="Create secret").click()
    code = dialog.locator("code")
    expect(code).to_contain_text("whsec_")
    secret = code.inner_text().strip()
    for path in ("tenants/signingsecret/", "admin/logentry/", f"tenants/tenant/{acme}/history/"):
        open_page(page, path)
        expect(page.locator("body")).to_contain_text("the old one leaked" if "signing" not in path else "whsec_…")
        assert secret not in page.content()


# --- charts, keyboard, phone, themes ---


HISTORY = """
from datetime import UTC, datetime, timedelta
from tests.factories import CapacityFactory, FailureFactory, LatencyFactory, LeaseAdviceFactory
from tests.factories import ThroughputFactory, UsageFactory, WebhookHealthFactory
today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
for n in range(3):
    at = today - timedelta(days=n)
    day = {"tenant_id": TID, "date": at.date()}
    UsageFactory(**day)
    for command in ("render", "resize", "x" * 100):
        key = day | {"command": command}
        for mart in (ThroughputFactory, LatencyFactory, CapacityFactory):
            for hour in range(24):
                mart(hour=at + timedelta(hours=hour), **key)
        FailureFactory(fingerprint=f"{command}: <img src=x onerror=alert(1)> {'z' * 80}", **key)
        LeaseAdviceFactory(**key)
    WebhookHealthFactory(endpoint="https://a.example/" + "y" * 120, hour=at, **day)
"""


@pytest.fixture(scope="package")
def history(site: Site, acme: str) -> None:
    site.shell(f"TID = {acme!r}\n{HISTORY}")


def count_drawn_pixels(page: Page, chart: str) -> int:
    """Return the number of coloured pixels of a chart's canvas. 0 while it has no size."""
    return int(
        page.evaluate(
            "name => { const c = document.querySelector(`canvas[data-chart=${name}]`);"
            " if (!c.width || !c.height) return 0;"
            " const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
            " return data.filter((value, at) => at % 4 == 3 && value).length; }",
            chart,
        )
    )


@pytest.mark.spec("PIP-4", "Charts of the marts by tenant, queue and period, in the light and the dark theme")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_history_is_drawn_as_charts(log_in: LogIn, acme: str, history: None, theme: str) -> None:
    page = log_in(color_scheme=theme)
    page.get_by_role("link", name="Charts").click()
    page.wait_for_url(re.compile("/console/insights/"))
    page.get_by_label("Tenant").select_option("acme")
    page.wait_for_url(re.compile(f"tenant={acme}"))
    page.locator("select[name=command]").select_option("resize")
    page.wait_for_url(re.compile("command=resize"))
    for chart in ("ended", "wait_time", "run_time", "workers", "worker_time", "deliveries"):
        expect(page.locator(f"canvas[data-chart={chart}]")).to_be_visible()
        until(lambda chart=chart: count_drawn_pixels(page, chart) > 500)
    expect(page.get_by_role("region", name="Failures")).to_contain_text("resize: <img src=x onerror=alert(1)>")
    expect(page.get_by_role("region", name="Leases")).to_contain_text("render")
    expect(page.get_by_role("region", name="Endpoints")).to_contain_text("https://a.example/")
    page.locator("select[name=days]").select_option("30")
    page.wait_for_url(re.compile("days=30"))
    assert "command=resize" in page.url
    until(lambda: count_drawn_pixels(page, "wait_time") > 500)


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element with this name has the focus, and check that it is visible."""
    for _ in range(120):
        page.keyboard.press("Tab")
        text, _, is_visible = page.evaluate(
            "() => { const e = document.activeElement; return [e.innerText || e.getAttribute('aria-label') || e.name,"
            " getComputedStyle(e).outlineStyle, e.getBoundingClientRect().height > 0]; }"
        )
        if name in (text or ""):
            assert is_visible
            return
    raise AssertionError(f"Tab does not reach {name}")


@pytest.mark.spec("ADM-3", "The console can be used with the keyboard alone")
def test_a_queue_is_paused_with_the_keyboard_alone(site: Site, log_in: LogIn) -> None:
    site.enqueue("acme", "keys", {})
    page = log_in()
    expect(page.locator("[data-queue='acme/keys']")).to_be_visible()
    tab_to(page, "keys")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/console/queue/"))
    tab_to(page, "Pause")
    page.keyboard.press("Enter")
    expect(page.locator("dialog#pause input[name=reason]")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("dialog#pause")).to_be_hidden()
    page.keyboard.press("Enter")
    page.keyboard.type("the disk is full")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Queue keys paused. Workers get no tasks from it.")).to_be_visible()
    expect(page.locator(".cq-badge", has_text="paused")).to_be_visible()
    tab_to(page, "Resume")
    page.keyboard.press("Enter")
    page.keyboard.type("the disk has space again")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Queue keys resumed.")).to_be_visible()


@pytest.mark.spec("ADM-3", "The console can be used with the keyboard alone")
def test_a_dead_letter_is_replayed_with_the_keyboard_alone(site: Site, log_in: LogIn, acme: str) -> None:
    [first, second] = site.create_dead_letters("acme", "typed", [{"n": n} for n in range(2)], "no disk")
    page = log_in()
    open_page(page, "console/dead/list/", tenant=acme, command="typed")
    tab_to(page, f"Select {first}")
    page.keyboard.press("Space")
    for _ in range(20):  # back to the button, which is enabled now
        page.keyboard.press("Shift+Tab")
        if "Replay selected" in (page.evaluate("document.activeElement.innerText") or ""):
            break
    page.keyboard.press("Enter")
    page.keyboard.type("the disk is back")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 replayed")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody")).to_contain_text(second)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(site: Site, log_in: LogIn, acme: str, history: None, theme: str) -> None:
    [task_id] = site.create_dead_letters("acme", "x" * 100, [{"long": "y" * 300}], "z" * 300)
    page = log_in(viewport=PHONE, color_scheme=theme)
    for path, query in (
        ("", {}),
        ("console/queue/", {"tenant": acme, "command": "x" * 100}),
        ("console/task/", {"tenant": acme, "id": task_id}),
        ("console/dead/", {}),
        ("console/dead/list/", {"tenant": acme}),
        ("console/bulk/", {}),
        ("console/tasks/", {"q": "z" * 60}),
        ("console/bulk/new/", {"tenant": acme, "command": "x" * 100}),
        ("console/insights/", {"tenant": acme, "command": "x" * 100}),
    ):
        open_page(page, path, **query)
        expect(page.locator(".cq")).to_be_visible()
        assert overflow_pixels(page) <= 0, path
        assert page.evaluate("document.documentElement.classList.contains('dark')") == (theme == "dark")
    links = page.locator("#nav-sidebar-apps a").evaluate_all("links => links.map((link) => link.href)")
    for link in links:
        page.goto(link)
        assert overflow_pixels(page) <= 0, link
    page.goto(f"{site.base}/admin/queues/auditedresult/{task_id}/change/")
    assert overflow_pixels(page) <= 0


def overflow_pixels(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_a_key_switches_between_light_and_dark(log_in: LogIn) -> None:
    page = log_in(color_scheme="light")
    is_dark = "document.documentElement.classList.contains('dark')"
    assert not page.evaluate(is_dark)
    for _ in range(2):  # from the system's theme to light, and from light to dark
        page.keyboard.press("Control+e")
    page.wait_for_function(is_dark)
    page.reload()
    page.wait_for_function(is_dark)


def test_a_page_shows_that_the_server_does_not_respond(log_in: LogIn) -> None:
    page = log_in()
    live = page.locator(".cq-live")
    expect(live).to_contain_text("Live")
    page.route("**/overview.json*", lambda route: route.fulfill(status=200, body="not JSON"))
    expect(live).to_contain_text("No response, retrying")
    page.unroute("**/overview.json*")
    expect(live).to_contain_text("Live")
