"""The OpenAPI document, generated from the declared operations and their structs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, get_args

import msgspec
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ComponentRegistry, ResolvedComponent
from msgspec import Struct

from core import errors, problem_details
from core.errors import CodeqError
from core.http.operation import Answer, Operation

JSON = "application/json"
REF = "#/components/schemas/{name}"
BODY_ERRORS = (errors.InvalidRequest, errors.RequestTimeout, errors.PayloadTooLarge, errors.UnsupportedMediaType)
CALLER_ERRORS = (errors.Unauthenticated, errors.Forbidden, errors.TenantSuspended)
REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Returned with the response if it consists of 1 to 128 of the characters `A-Za-z0-9._-`. Otherwise "
    "a new id is created.",
    "schema": {"type": "string"},
}
HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {"description": "The request's id.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
}


# Operation -> status -> (the operations to call next, the parameters that they take from the answer).
Links = Mapping[str, Mapping[int, list[tuple[tuple[str, ...], dict[str, str]]]]]

# Filled by the apps through `register`.
EXAMPLES: dict[str, Mapping[Any, Any]] = {}
LINKS: dict[str, Mapping[int, list[tuple[tuple[str, ...], dict[str, str]]]]] = {}
RULES: dict[str, dict[str, Any]] = {}
PATH_SCHEMAS: dict[str, dict[str, Any]] = {}


def register(
    *,
    examples: Mapping[str, Mapping[Any, Any]] | None = None,
    links: Links | None = None,
    rules: Mapping[str, dict[str, Any]] | None = None,
    path_schemas: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Add parts of the document that cannot be derived from an app's operations and structs.

    `examples` and `links` are keyed by the name of an operation, `rules` (JSON Schema constraints on several fields) by
    the name of a struct, `path_schemas` by the name of a path parameter.
    """
    EXAMPLES.update(examples or {})
    LINKS.update(links or {})
    RULES.update(rules or {})
    PATH_SCHEMAS.update(path_schemas or {})


class ApiSchema(AutoSchema):
    """Describe the operations of an `ApiView` to drf-spectacular."""

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: ComponentRegistry
    ) -> dict[str, Any] | None:
        from core.http.api_view import ApiView

        assert isinstance(self.view, ApiView)
        operation, handler = self.view.operations[method]
        self.registry = registry
        examples = EXAMPLES.get(operation.name, {})
        document: dict[str, Any] = {
            "operationId": operation.name,
            "tags": [operation.tag],
            "summary": operation.summary,
            "description": " ".join((handler.__doc__ or "").split()),
            "parameters": [
                *self._path_parameters(path, self.view.path_schemas),
                *self._query(operation.query),
                self._request_id(),
            ]
            + [
                {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                for name, text in operation.headers.items()
            ],
            "security": [] if operation.is_open else [{"bearer": []}],
            "responses": {},
        }
        if operation.body is not None:
            document["requestBody"] = {
                "required": not operation.is_body_optional,
                "content": {JSON: _content(self._reference(operation.body), examples.get("request"))},
            }
        for status, kind in operation.answers.items():
            response = self._answer(status, kind, examples.get(status), operation.answer_headers)
            if links := _links_of(operation.name, status):
                response["links"] = links
            document["responses"][str(status)] = response
        document["responses"] |= self._problems(errors_of(operation))
        registry.register_on_missing(_bearer())
        return document

    def _path_parameters(self, path: str, own: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for part in path.split("/"):
            if part.startswith("{"):
                name = part.strip("{}")
                schema = {**PATH_SCHEMAS, **own}[name]
                yield {"name": name, "in": "path", "required": True, "schema": schema}

    def _query(self, kind: type[Struct] | None) -> Iterator[dict[str, Any]]:
        if kind is None:
            return
        component = _components([kind])[kind.__name__]
        for name, schema in component["properties"].items():
            text = schema.pop("description", "")
            parameter = {"name": name, "in": "query", "description": text, "schema": schema}
            yield parameter | ({"required": True} if name in component["required"] else {})

    def _answer(self, status: int, kind: Answer, example: Any, headers: Mapping[str, str]) -> dict[str, Any]:
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase, "headers": self._headers("X-Request-Id")}
        for name, text in headers.items():
            response["headers"][name] = {"description": text, "schema": {"type": "string"}}
        if isinstance(kind, tuple):
            media_type, struct = kind
            response["content"] = {media_type: _content(self._reference(struct), example)}
        elif isinstance(kind, str):
            response["content"] = {kind: {"schema": {"type": "string"}}}
        elif kind is not None:
            response["content"] = {JSON: _content(self._reference(kind), example)}
        return response

    def _problems(self, error_types: Iterable[type[CodeqError]]) -> dict[str, Any]:
        by_status: dict[int, list[type[CodeqError]]] = {}
        for error in error_types:
            by_status.setdefault(error.status, []).append(error)
        return {str(status): self._problem(status, kinds) for status, kinds in sorted(by_status.items())}

    def _problem(self, status: int, kinds: list[type[CodeqError]]) -> dict[str, Any]:
        """Return the response for one status. It is a component, because many operations share it."""
        headers = ("X-Request-Id", "Retry-After") if status in (429, 503) else ("X-Request-Id",)
        response = {
            "description": " / ".join(f"`{kind.code}`: {_description_of(kind)}" for kind in kinds),
            "headers": self._headers(*headers),
            "content": {
                problem_details.MEDIA_TYPE: {
                    "schema": self._reference(problem_details.Problem),
                    "examples": {kind.code: {"value": msgspec.to_builtins(_example(kind))} for kind in kinds},
                }
            },
        }
        name = "".join(kind.__name__ for kind in kinds)
        return self._component(name, ResolvedComponent.RESPONSE, response)

    def _headers(self, *names: str) -> dict[str, Any]:
        return {name: self._component(name, ResolvedComponent.HEADER, HEADERS[name]) for name in names}

    def _request_id(self) -> dict[str, Any]:
        return self._component("X-Request-Id", ResolvedComponent.PARAMETER, REQUEST_ID)

    def _component(self, name: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        component = ResolvedComponent(name, kind, schema, f"{kind}:{name}")  # type: ignore[no-untyped-call]
        self.registry.register_on_missing(component)
        return {"$ref": f"#/components/{kind}/{name}"}

    def _reference(self, kind: Any) -> dict[str, Any]:
        """Register a struct and return a reference to it; for a tagged union, to each member."""
        kinds = get_args(kind) or (kind,)
        for name, schema in _components(kinds).items():
            self._component(name, ResolvedComponent.SCHEMA, schema)
        references = [{"$ref": REF.format(name=struct.__name__)} for struct in kinds]
        if len(references) == 1:
            return references[0]
        configs = [struct.__struct_config__ for struct in kinds]
        mapping = {config.tag: reference["$ref"] for config, reference in zip(configs, references, strict=True)}
        return {"oneOf": references, "discriminator": {"propertyName": configs[0].tag_field, "mapping": mapping}}


def errors_of(operation: Operation) -> list[type[CodeqError]]:
    """Return every error that the operation can return."""
    error_types: list[type[CodeqError]] = []
    if operation.body is not None:
        error_types += BODY_ERRORS
    if operation.query is not None:
        error_types.append(errors.InvalidRequest)
    if not operation.is_open:
        error_types += [*CALLER_ERRORS, errors.Unavailable]
    if operation.rate is not None:
        error_types.append(errors.TooMany)
    error_types += operation.errors
    return list(dict.fromkeys(error_types))


def _links_of(name: str, status: int) -> dict[str, Any]:
    """Return the OpenAPI links of one response, by the operation to call next."""
    return {
        operation: {"operationId": operation, "parameters": parameters}
        for operations, parameters in LINKS.get(name, {}).get(status, [])
        for operation in operations
    }


def _components(kinds: Iterable[Any]) -> dict[str, dict[str, Any]]:
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for name, schema in components.items():
        schema.update(RULES.get(name, {}))
        if (text := schema.get("description")) is not None:
            schema["description"] = " ".join(text.split())
    portable: dict[str, dict[str, Any]] = _portable(components)
    return portable


def _portable(node: Any) -> Any:
    """Return the schema with ECMAScript patterns, explicit types and no empty defaults."""
    if isinstance(node, dict):
        if node.get("type") == "number" and node.get("multipleOf") == 1:
            node = {key: value for key, value in node.items() if key != "multipleOf"} | {"type": "integer"}
        if isinstance(node.get("enum"), list) and all(isinstance(value, str) for value in node["enum"]):
            node = {"type": "string", **node}
        return {
            key: value.replace(r"(?!\n)$", "$") if key == "pattern" else _portable(value)
            for key, value in node.items()
            if not (key == "default" and value in ("", None))
        }
    if isinstance(node, list):
        return [_portable(item) for item in node]
    return node


def _content(schema: dict[str, Any], example: Any) -> dict[str, Any]:
    return {"schema": schema} if example is None else {"schema": schema, "example": example}


def _description_of(kind: type[CodeqError]) -> str:
    return (kind.__doc__ or "").strip()


def _example(kind: type[CodeqError]) -> problem_details.Problem:
    return msgspec.structs.replace(problem_details.describe(kind()), request_id="0f3c1a5b7d9e4c2f8a6b0d1e3f507294")


def _bearer() -> ResolvedComponent:
    return ResolvedComponent(  # type: ignore[no-untyped-call]
        name="bearer",
        type=ResolvedComponent.SECURITY_SCHEMA,
        object="bearer",
        schema={"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
    )
