"""The policy of a queue, on the queue's page. Only the tenant's admins may change it."""

from __future__ import annotations

from typing import Any, get_args

from django.http import HttpRequest

from console.actions import OperatorAction, record_action
from core import errors
from core.conf import BackoffPolicy, conf
from queues import policies
from queues.policies import Policy
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

BACKOFFS = get_args(BackoffPolicy)


class SavePolicy(OperatorAction):
    required_role = Role.ADMIN

    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with record_action(self.request, tenant, f"Set the policy of queue {command}", reason):
            row, _ = policies.put(tenant, command, parse_policy(self.request), actor=self.request.user.get_username())
        return f"Policy saved as version {row.version}."


class DeletePolicy(OperatorAction):
    required_role = Role.ADMIN

    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with record_action(self.request, tenant, f"Removed the policy of queue {command}", reason):
            policies.delete(tenant, command)
        return "Policy removed. The defaults apply to this queue."


def build_context(tenant: TenantSnapshot, command: str) -> dict[str, Any]:
    """Return the values that apply, those that the policy sets, and the form's initial values."""
    try:
        row = policies.find(tenant, command)
    except errors.NotFound:
        row = None
    own = policies.from_row(row) if row else Policy()
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
            ("Default maximum attempts", own.max_attempts or queues.max_attempts, own.max_attempts),
            ("Priorities", "0 to 9" if tiers is None else ", ".join(map(str, tiers)), tiers),
            ("Maximum tasks in progress", own.max_consumers or "no limit", own.max_consumers),
            ("Backoff", f"{backoff}, from {base:g} s to {cap:g} s", has_backoff),
            ("Retention of ended tasks", f"{retention_seconds / 3600:g} h", own.retention_seconds),
            ("Dead letter queue", own.dead_letter_topic or "this queue", own.dead_letter_topic),
        ],
    }


def parse_policy(request: HttpRequest) -> Policy:
    """Parse the submitted policy. Raises InvalidRequest, which names the first invalid field."""
    tiers = request.POST.get("priorityTiers", "").replace(",", " ").split()
    return Policy(
        max_attempts=_parse_integer(request, "maxAttempts", "Default maximum attempts"),
        priority_tiers=tuple(_to_integer("Priority", tier) for tier in tiers) or None,
        retention_seconds=_parse_integer(request, "retentionSeconds", "Retention of ended tasks"),
        max_consumers=_parse_integer(request, "maxConsumers", "Maximum tasks in progress"),
        dead_letter_topic=request.POST.get("deadLetterTopicRef", "").strip(),
        backoff=request.POST.get("backoff", "").strip(),
        backoff_base_seconds=_parse_seconds(request, "backoffBaseSeconds", "Shortest backoff"),
        backoff_cap_seconds=_parse_seconds(request, "backoffCapSeconds", "Longest backoff"),
    )


def _parse_integer(request: HttpRequest, name: str, label: str) -> int | None:
    text = request.POST.get(name, "").strip()
    return _to_integer(label, text) if text else None


def _to_integer(label: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise errors.InvalidRequest(f"{label}: {text[:20]!r} is not a whole number.")
    return int(text)


def _parse_seconds(request: HttpRequest, name: str, label: str) -> float | None:
    text = request.POST.get(name, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise errors.InvalidRequest(f"{label}: {text[:20]!r} is not a number of seconds.") from None
