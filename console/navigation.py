"""The admin's sidebar: the live pages, then the tables in groups."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

# Group -> its models and their icons. Other models appear in a group with the name of their app.
TABLES: dict[str, dict[str, str]] = {
    "Tenants": {
        "tenants.Tenant": "domain", "tenants.TenantMembership": "badge", "tenants.TenantIssuer": "verified_user",
        "tenants.SigningSecret": "key", "admin.LogEntry": "policy",
    },
    "History": {
        "queues.AuditedResult": "task_alt", "queues.Attempt": "history", "queues.QueuePolicy": "rule",
    },
    "Webhooks": {
        "webhooks.Delivery": "outgoing_mail", "webhooks.Endpoint": "webhook", "webhooks.Subscription": "notifications",
        "webhooks.Circuit": "electrical_services",
    },
    "Insights": {
        "pipeline.Throughput": "bar_chart", "pipeline.Latency": "timelapse", "pipeline.Failure": "bug_report",
        "pipeline.Usage": "data_usage", "pipeline.Capacity": "speed", "pipeline.LeaseAdvice": "lightbulb",
        "pipeline.WebhookHealth": "monitor_heart", "pipeline.RunLog": "play_circle",
    },
    "Platform": {
        "queues.PeriodicTaskRun": "timer", "queues.Quarantine": "report", "auth.User": "person",
    },
}  # fmt: skip
# Names that replace the model's own, which is less clear.
NAMES = {
    "admin.LogEntry": "Operator actions",
    "tenants.TenantMembership": "Memberships",
    "tenants.TenantIssuer": "Issuers",
    "queues.PeriodicTaskRun": "Periodic tasks",
}
PAGES = (
    ("Overview", "console:overview", "monitoring", ("/console/queue/",)),
    ("Tasks", "console:tasks", "search", ("/console/task/",)),
    ("Dead letters", "console:dead", "skull", ()),
    ("Bulk jobs", "console:bulk", "playlist_play", ()),
)
# Group -> the page that appears above its tables.
GROUP_PAGES = {"Insights": ("Charts", "charts:page", "insights", ())}


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the groups, with the pages and tables that the user may open. Called by the theme."""
    tables = {
        model["model"]._meta.label: model
        for app in admin.site.get_app_list(request)
        for model in app["models"]
        if model["admin_url"]
    }
    groups: list[dict[str, Any]] = [{"title": "Live", "items": [_page_item(request, *page) for page in PAGES]}]
    for title, icons in TABLES.items():
        items = [_table_item(request, tables.pop(label), icon) for label, icon in icons.items() if label in tables]
        if title in GROUP_PAGES:
            items.insert(0, _page_item(request, *GROUP_PAGES[title]))
        groups.append({"title": title, "separator": True, "items": items})
    others: dict[str, list[dict[str, Any]]] = {}
    for model in tables.values():
        app = model["model"]._meta.app_config.verbose_name
        others.setdefault(app, []).append(_table_item(request, model, "table_chart"))
    # Insert them before the last group, Platform.
    groups[-1:-1] = [{"title": title, "separator": True, "items": items} for title, items in others.items()]
    return [group for group in groups if group["items"]]


def _page_item(request: HttpRequest, title: str, name: str, icon: str, subpages: tuple[str, ...]) -> dict[str, Any]:
    link = reverse(name)
    path = request.path
    # The URL of the overview is a prefix of the URLs of all other pages.
    is_subpage = any(part in path for part in subpages) or (name != "console:overview" and path.startswith(link))
    return {"title": title, "icon": icon, "link": link, "active": path == link or is_subpage}


def _table_item(request: HttpRequest, model: dict[str, Any], icon: str) -> dict[str, Any]:
    link = model["admin_url"]
    name = NAMES.get(model["model"]._meta.label, model["name"])
    return {"title": name, "icon": icon, "link": link, "active": request.path.startswith(link)}
