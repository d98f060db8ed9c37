"""A check that every response in these tests matches the OpenAPI document."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from drf_spectacular.generators import SchemaGenerator
from openapi_schema_validator import OAS31Validator

if TYPE_CHECKING:
    from tests.queues.api.asgi_client import Response

# Statuses of unknown paths, of other methods and of bugs. An operation need not declare them.
UNDECLARED_STATUSES = (404, 405, 500)


@cache
def document() -> dict[str, Any]:
    generated: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    return generated


@cache
def _paths() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    paths = [(re.sub(r"{\w+}", "[^/]+", path), methods) for path, methods in document()["paths"].items()]
    # Paths without a parameter come first, because the URLconf also resolves them first.
    return [(re.compile(path), methods) for path, methods in sorted(paths, key=lambda path: "[" in path[0])]


@cache
def validator(reference: str) -> OAS31Validator:
    return OAS31Validator({"$ref": reference, "components": document()["components"]})


def check(method: str, path: str, response: Response) -> None:
    """Fail if the document does not declare the status, the media type or the body."""
    target = unquote(path.partition("?")[0])
    methods = next((methods for pattern, methods in _paths() if pattern.fullmatch(target)), {})
    operation = methods.get("get" if method == "HEAD" else method.lower())
    if operation is None or (
        response.status in UNDECLARED_STATUSES and str(response.status) not in operation["responses"]
    ):
        return
    declared = operation["responses"].get(str(response.status))
    assert declared is not None, f"{method} {path} answered {response.status}, which it does not declare"
    if "$ref" in declared:
        declared = document()["components"]["responses"][declared["$ref"].rpartition("/")[2]]
    media_types = declared.get("content", {})
    if not media_types or method == "HEAD":
        assert response.body == b""
        return
    media_type = response.headers["content-type"].partition(";")[0]
    assert media_type in media_types, f"{method} {path} answered {media_type}"
    # The schema of a response body, or of several alternatives.
    schema = media_types[media_type]["schema"]
    if references := [reference["$ref"] for reference in schema.get("oneOf", [schema]) if "$ref" in reference]:
        errors = min(([*validator(reference).iter_errors(response.json)] for reference in references), key=len)
        assert not errors, (method, path, response.status, errors[0].message)
    if media_type == "application/problem+json":
        codes = set(media_types[media_type]["examples"])
        assert response.json["code"] in codes, f"{method} {path} answered {response.json['code']}, not one of {codes}"
