"""Permission classes of the API, by role and by scope, and the commands of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from rest_framework.permissions import BasePermission

from core.errors import Forbidden, TenantSuspended
from tenants.domain import ANY_COMMAND, Caller, CallerRole

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView


class HasRole(BasePermission):
    """Require one of `roles` in the token."""

    roles: ClassVar[frozenset[CallerRole]]

    def has_permission(self, request: Request, view: APIView) -> bool:
        caller: object = request.user
        return isinstance(caller, Caller) and not self.roles.isdisjoint(caller.roles)


class IsProducer(HasRole):
    message = "This operation requires a producer's token."
    roles = frozenset({CallerRole.PRODUCER})


class IsWorker(HasRole):
    message = "This operation requires a worker's token."
    roles = frozenset({CallerRole.WORKER})


class IsProducerOrWorker(HasRole):
    message = "This operation requires a producer's or a worker's token."
    roles = frozenset({CallerRole.PRODUCER, CallerRole.WORKER})


class IsAdmin(HasRole):
    message = "This operation requires an administrator's token."
    roles = frozenset({CallerRole.ADMIN, CallerRole.OPERATOR})


@cache
def HasScope(scope: str) -> type[BasePermission]:  # noqa: N802 - read as the permission class it returns
    """Return the permission class that requires a scope in a worker's token.

    A token without the worker role is refused even if it has the scope.
    """

    class ScopePermission(BasePermission):
        message = f"The token does not have the scope {scope}."

        def has_permission(self, request: Request, view: APIView) -> bool:
            caller: object = request.user
            return isinstance(caller, Caller) and scope in caller.scopes and CallerRole.WORKER in caller.roles

    return ScopePermission


def commands_for(caller: Caller, requested: Sequence[str] | None) -> list[str]:
    """Return the commands to claim: the requested ones, or all that the token allows.

    `["*"]` stands for every queue of the tenant and requires a token with `*`. Raises Forbidden for a command that the
    token does not allow.
    """
    if not requested:
        if not caller.commands:
            raise Forbidden("The token allows no command, because it has no `eventTypes`.")
        return [ANY_COMMAND] if ANY_COMMAND in caller.commands else sorted(caller.commands)
    if ANY_COMMAND not in caller.commands:
        for command in requested:
            if command not in caller.commands:
                raise Forbidden(f"The token does not allow the command {command}.")
    return list(dict.fromkeys(requested))


def refuse_new_work(caller: Caller) -> None:
    """Raise TenantSuspended if the tenant is suspended.

    A suspended tenant may only finish tasks that its workers have claimed.
    """
    if caller.tenant.is_suspended:
        raise TenantSuspended()
