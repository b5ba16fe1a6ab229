"""The OpenAPI document of the service, made of its routes and the structs of their bodies, and a page of it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kbrl_async.serving.documents import Refusal

_NAME = "#/components/schemas/{name}"


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    does: str
    handler: str
    takes: Any = None
    gives: Any = None
    streams: bool = False
    """Server-sent events, for who accepts `text/event-stream`."""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    types = [kind for operation in operations for kind in (operation.takes, operation.gives) if kind is not None]
    kinds = list(dict.fromkeys([*types, Refusal]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_NAME)
    of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kbrl serve", "version": _version(), "description": "Verified and timed kernels."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _described(operation: Operation, of: dict[Any, Any]) -> dict[str, Any]:
    refused = {"description": "refused: cause and cure", "content": _json(of[Refusal])}
    fine: dict[str, Any] = {"description": "done"}
    if operation.gives is not None:
        fine["content"] = _json(of[operation.gives])
        if operation.streams:
            fine["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "summary": operation.does,
        "operationId": operation.handler,
        "responses": {"200": fine, "default": refused},
    }
    if operation.takes is not None:
        found["requestBody"] = {"required": True, "content": _json(of[operation.takes])}
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        schema = {"type": "string"}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    return found


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _version() -> str:
    try:
        return version("kbrl-async")
    except PackageNotFoundError:
        return "0"


def page(found: dict[str, Any]) -> str:
    """The document for a person: it needs no other host, as pages that load a viewer do."""
    rows = [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{html.escape(what['summary'])}</td>"
        f"<td>{_body(what)}</td></tr>"
        for path, methods in found["paths"].items()
        for method, what in methods.items()
    ]
    schemas = "".join(
        f"<h3 id={html.escape(name)}>{html.escape(name)}</h3><p>{html.escape(schema.get('description', ''))}</p>"
        f"<table>{''.join(_field(field, kind) for field, kind in schema.get('properties', {}).items())}</table>"
        for name, schema in found["components"]["schemas"].items()
    )
    style = "body{font:15px system-ui;margin:2em auto;max-width:60em}td{padding:.2em .8em;vertical-align:top}"
    return (
        f"<!doctype html><meta charset=utf-8><title>kbrl serve</title><style>{style}</style><h1>kbrl serve</h1>"
        f"<p><a href=openapi.json>openapi.json</a></p><table>{''.join(rows)}</table><h2>Bodies</h2>{schemas}"
    )


def _body(what: dict[str, Any]) -> str:
    content = what.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f"<a href='#{html.escape(name)}'>{html.escape(name)}</a>" if name else ""


def _field(name: str, kind: dict[str, Any]) -> str:
    said = (
        kind.get("$ref", "").rpartition("/")[2]
        or kind.get("type")
        or " or ".join(str(one.get("type", one.get("$ref", "").rpartition("/")[2])) for one in kind.get("anyOf", []))
    )
    values = f": {', '.join(map(str, kind['enum']))}" if "enum" in kind else ""
    default = f" = {kind['default']!r}" if "default" in kind else ""
    return f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(f'{said}{values}{default}')}</td></tr>"
