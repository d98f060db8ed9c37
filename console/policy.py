"""A queue's own policy, in the console: shown to whoever sees the queue, changed by the tenant's admins."""

from __future__ import annotations

from typing import Any, get_args

from django.http import HttpRequest

from console.actions import Act, recorded
from core import errors
from core.conf import BackoffPolicy, conf
from queues import policies
from queues.policies import Policy
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

BACKOFFS = get_args(BackoffPolicy)


class PutPolicy(Act):
    least = Role.ADMIN

    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with recorded(self.request, tenant, f"Set the policy of queue {command}", reason):
            row, _ = policies.put(tenant, command, read(self.request), actor=self.request.user.get_username())
        return f"The policy holds: version {row.version}."


class DeletePolicy(Act):
    least = Role.ADMIN

    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with recorded(self.request, tenant, f"Removed the policy of queue {command}", reason):
            policies.delete(tenant, command)
        return "What holds everywhere holds for this queue again."


def shown(tenant: TenantSnapshot, command: str) -> dict[str, Any]:
    """What a page says of the policy: what holds, from where, and the form's values."""
    try:
        row = policies.find(tenant, command)
    except errors.NotFound:
        row = None
    own = policies.value_of(row) if row else Policy()
    queues = conf().queues
    backoff, base, cap = (
        own.backoff or queues.backoff,
        queues.backoff_base_seconds if own.backoff_base_seconds is None else own.backoff_base_seconds,
        queues.backoff_cap_seconds if own.backoff_cap_seconds is None else own.backoff_cap_seconds,
    )
    retention_seconds = own.retention_seconds or tenant.retention_ms // 1000
    has_backoff = (own.backoff or None, own.backoff_base_seconds, own.backoff_cap_seconds) != (None, None, None)
    tiers = own.priority_tiers
    return {
        "version": row.version if row else None,
        "changed_by": row.changed_by if row else "",
        "own": own,
        "tiers": "" if tiers is None else ", ".join(map(str, tiers)),
        "facts": [
            ("Attempts, where a task names none", own.max_attempts or queues.max_attempts, own.max_attempts),
            ("Priorities", "0 to 9" if tiers is None else ", ".join(map(str, tiers)), tiers),
            ("In progress at once", own.max_consumers or "no limit", own.max_consumers),
            ("Backoff", f"{backoff}, from {base:g} s to {cap:g} s", has_backoff),
            ("Ended tasks stay", f"{retention_seconds / 3600:g} h", own.retention_seconds),
            ("Dead letters go to", own.dead_letter_topic or "this queue's own", own.dead_letter_topic),
        ],
    }


def read(request: HttpRequest) -> Policy:
    """The policy a form asks for. InvalidRequest names the field that is wrong."""
    tiers = request.POST.get("priorityTiers", "").replace(",", " ").split()
    return Policy(
        max_attempts=_whole(request, "maxAttempts"),
        priority_tiers=tuple(_number("priorityTiers", each) for each in tiers) or None,
        retention_seconds=_whole(request, "retentionSeconds"),
        max_consumers=_whole(request, "maxConsumers"),
        dead_letter_topic=request.POST.get("deadLetterTopicRef", "").strip(),
        backoff=request.POST.get("backoff", "").strip(),
        backoff_base_seconds=_seconds(request, "backoffBaseSeconds"),
        backoff_cap_seconds=_seconds(request, "backoffCapSeconds"),
    )


def _whole(request: HttpRequest, name: str) -> int | None:
    text = request.POST.get(name, "").strip()
    return _number(name, text) if text else None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise errors.InvalidRequest(f"{name}: a whole number")
    return int(text)


def _seconds(request: HttpRequest, name: str) -> float | None:
    text = request.POST.get(name, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise errors.InvalidRequest(f"{name}: a number of seconds") from None
