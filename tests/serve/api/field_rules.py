"""What a route knows of the fields that clients send."""

from __future__ import annotations

from pydantic import BaseModel

from petatron.serve.http.request_field_rules import NO_EFFECT, REFUSED, FieldRule


def supported_fields(body: type[BaseModel]) -> set[str]:
    """Returns the names of a body's fields."""
    return {field.alias or name for name, field in body.model_fields.items()}


def field_rules(body: type[BaseModel]) -> dict[str, FieldRule | None]:
    """Returns the rule of every field that a route knows; None for those of its body."""
    return {**NO_EFFECT, **REFUSED, **dict.fromkeys(supported_fields(body))}
