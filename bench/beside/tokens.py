"""Print tokens of the service in CODEQ_HOME as JSON: `python -m bench.beside.tokens`."""

from __future__ import annotations

import json

import django

TENANT = "demo"


def main() -> None:
    django.setup()
    from tenants.domain import CallerRole
    from tenants.services import issue_token

    roles = (CallerRole.PRODUCER, CallerRole.WORKER, CallerRole.ADMIN)
    print(json.dumps({str(role): issue_token(TENANT, role, "bench") for role in roles}))


if __name__ == "__main__":
    main()
