"""Who may do what: guards for the API's views, and the commands a worker may touch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from rest_framework.permissions import BasePermission

from codeq_site.errors import Forbidden, TenantSuspended
from tenants.tenant import ANY_COMMAND, Caller, Role

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView


class Guard(BasePermission):
    """Lets a caller through or not, by its token alone."""

    def allows(self, caller: Caller) -> bool:
        raise NotImplementedError

    def has_permission(self, request: Request, view: APIView) -> bool:
        caller: object = request.user
        return isinstance(caller, Caller) and self.allows(caller)


class _HasRole(Guard):
    roles: ClassVar[frozenset[Role]]

    def allows(self, caller: Caller) -> bool:
        return not self.roles.isdisjoint(caller.roles)


class IsProducer(_HasRole):
    message = "This needs a producer's token."
    roles = frozenset({Role.PRODUCER})


class IsWorker(_HasRole):
    message = "This needs a worker's token."
    roles = frozenset({Role.WORKER})


class IsEither(_HasRole):
    message = "This needs a producer's or a worker's token."
    roles = frozenset({Role.PRODUCER, Role.WORKER})


class IsAdmin(_HasRole):
    message = "This needs an administrator's token."
    roles = frozenset({Role.ADMIN, Role.OPERATOR})


@cache
def HasScope(scope: str) -> type[Guard]:  # noqa: N802 - read as the permission class it returns
    """The worker's token must have this scope. A scope in a producer's token opens no worker's door."""

    class _HasScope(Guard):
        message = f"The token lacks the scope {scope}."

        def allows(self, caller: Caller) -> bool:
            return scope in caller.scopes and Role.WORKER in caller.roles

    return _HasScope


def commands_for(caller: Caller, asked: Sequence[str] | None) -> list[str]:
    """The commands a worker's call is about: those asked for, or all the token allows.

    `["*"]` stands for every queue of the tenant, and only a token with `*` ever gets it. Raises Forbidden.
    """
    if not asked:
        if not caller.commands:
            raise Forbidden("The token allows no command: it has no `eventTypes`.")
        return [ANY_COMMAND] if ANY_COMMAND in caller.commands else sorted(caller.commands)
    for command in asked:
        if not caller.has_command(command):
            raise Forbidden(f"The token does not allow the command {command}.")
    return list(dict.fromkeys(asked))


def refuse_new_work(caller: Caller) -> None:
    """For a verb that both ends work and takes new (exchange): its second half, for a suspended tenant."""
    if caller.tenant.suspended:
        raise TenantSuspended()
