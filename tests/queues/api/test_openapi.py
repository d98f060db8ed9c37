"""The OpenAPI document: correct, valid, complete, and served without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from drf_spectacular.generators import SchemaGenerator
from openapi_spec_validator import validate

from core import errors, problem_details
from core.http.api_view import ApiView
from core.http.openapi import ApiSchema, errors_of
from queues.api import schemas as api_schemas
from queues.api.examples import EXAMPLES
from queues.api.links import LINKS
from tests.queues.api import conformity
from tests.queues.api.asgi_client import Client
from tests.queues.api.routes import ROUTE_CASES, list_routes

GOLDEN = Path(__file__).parents[3] / "docs" / "reference" / "openapi.yaml"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    generated: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    return generated


def list_views() -> list[type[ApiView]]:
    return ApiView.__subclasses__()


@pytest.mark.spec("DOC-1", "The OpenAPI document that is served is the one in the repository")
async def test_served_document_is_the_file_of_the_repository(anonymous: Client) -> None:
    response = await anonymous.get("/api/schema/")
    assert response.status == 200
    assert yaml.safe_load(response.body) == yaml.safe_load(GOLDEN.read_text(encoding="utf-8")), (
        "docs/reference/openapi.yaml differs from the code. Run `make docs` and review the changes."
    )


@pytest.mark.spec("DOC-1", "The document is valid OpenAPI 3.1 and has every route")
def test_the_document_is_valid_and_complete(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"].startswith("3.1")
    documented_routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    existing_routes = {(method, re.sub(r"<str:(\w+)>", r"{\1}", path)) for method, path in list_routes()}
    assert documented_routes == existing_routes
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        assert operation["description"]


@pytest.mark.spec("DOC-1", "A response links to other operations and names the parameters that they take from it")
def test_every_link_matches_the_parameters_of_its_operation(document: dict[str, Any]) -> None:
    operations = {
        operation["operationId"]: operation for methods in document["paths"].values() for operation in methods.values()
    }
    declared = {name for name, statuses in LINKS.items() if statuses}
    linked = set()
    for operation in operations.values():
        for status, response in operation["responses"].items():
            for link in response.get("links", {}).values():
                linked.add(operation["operationId"])
                required_parameters = {
                    parameter["name"]
                    for parameter in operations[link["operationId"]]["parameters"]
                    if parameter.get("required")
                }
                assert set(link["parameters"]) <= required_parameters
                assert status < "300"
    assert linked == declared


@pytest.mark.spec("DOC-1", "Every operation declares its errors, all as problem documents")
def test_every_error_is_a_problem(document: dict[str, Any]) -> None:
    responses = document["components"]["responses"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            statuses = set(operation["responses"])
            if ROUTE_CASES[(method.upper(), re.sub(r"{(\w+)}", r"<str:\1>", path))].role != "public":
                assert {"401", "403", "503"} <= statuses, (method, path)
                assert operation["security"] == [{"bearer": []}]
            else:
                assert operation["security"] == []
            if "requestBody" in operation:
                assert {"400", "408", "413", "415"} <= statuses
            for status, response in operation["responses"].items():
                if status >= "400":
                    named = responses[response["$ref"].rpartition("/")[2]]
                    assert list(named["content"]) == [problem_details.MEDIA_TYPE]
                    assert "X-Request-Id" in named["headers"]
                    assert ("Retry-After" in named["headers"]) == (status in ("429", "503"))


def test_every_error_is_documented_or_belongs_to_no_route() -> None:
    declared = {
        error for view in list_views() for operation, _ in view.operations.values() for error in errors_of(operation)
    }
    leaves = {error_type for error_type in all_errors(errors.CodeqError) if error_type.status < 600}
    # Errors of the router, and base classes that are never raised.
    outside = {errors.CodeqError, errors.MethodNotAllowed, errors.NotFound, errors.Conflict}
    assert not leaves - declared - outside - UNUSED


# Errors without a route yet.
UNUSED: set[type[errors.CodeqError]] = {errors.NotDead}


def all_errors(error_type: type[errors.CodeqError]) -> set[type[errors.CodeqError]]:
    return {error_type}.union(
        *(all_errors(subclass) for subclass in error_type.__subclasses__() if subclass.__module__ == errors.__name__)
    )


def test_codes_are_unique() -> None:
    codes = [error_type.code for error_type in all_errors(errors.CodeqError)]
    assert len(codes) == len(set(codes))


CASES = [(name, status, example) for name, examples in EXAMPLES.items() for status, example in examples.items()]


@pytest.mark.spec("DOC-1", "Every example is decoded and encoded by its schema")
@pytest.mark.parametrize(("name", "status", "example"), CASES, ids=[f"{name}-{status}" for name, status, _ in CASES])
def test_example_matches_its_schema(name: str, status: str | int, example: Any) -> None:
    operations = {operation.name: operation for view in list_views() for operation, _ in view.operations.values()}
    if status == "request":
        msgspec.json.decode(msgspec.json.encode(example), type=operations[name].body)
    else:
        kind = operations[name].answers[int(status)]
        errors = list(conformity.validator(f"#/components/schemas/{kind.__name__}").iter_errors(example))
        assert not errors
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert set(example) <= known, "an example must not show what is never sent"


def test_every_operation_with_a_body_has_an_example() -> None:
    for view in list_views():
        for operation, _ in view.operations.values():
            if operation.body is not None:
                assert "request" in EXAMPLES.get(operation.name, {}) or operation.name in ("pause", "resume")


def test_patterns_are_valid_in_ecmascript(document: dict[str, Any]) -> None:
    text = yaml.safe_dump(document)
    assert "(?!" not in text


def test_limits_in_the_schema_are_the_settings(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["NewTasks"]["properties"]["tasks"]["maxItems"] == api_schemas.LIMITS.batch
    lease = schemas["NewClaim"]["properties"]["leaseSeconds"]["anyOf"][0]
    assert (lease["minimum"], lease["maximum"]) == (1, api_schemas.LIMITS.lease_limit_seconds)
    assert schemas["NewTask"]["additionalProperties"] is False


@pytest.mark.spec("DOC-1", "Swagger UI and ReDoc are part of the package: nothing is fetched from elsewhere")
@pytest.mark.parametrize("page", ["/api/docs/", "/api/redoc/"])
async def test_the_browsable_documents_need_no_network(anonymous: Client, page: str) -> None:
    response = await anonymous.get(page)
    assert response.status == 200
    text = response.body.decode()
    addresses = re.findall(r"""(?:src=|href=|url: )["']([^"']+)""", text)
    assert addresses
    for address in addresses:
        assert address.startswith(("/static/", "/api/", "data:")), address
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    for address in {address for address in addresses if address.startswith("/static/")}:
        asset = await anonymous.get(address)
        assert asset.status == 200, address


def test_every_view_of_the_api_declares_its_operations() -> None:
    for view in list_views():
        assert view.operations
        assert isinstance(view.schema, ApiSchema)
