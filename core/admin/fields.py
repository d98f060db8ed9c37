"""Form fields that reject values for which Django's own fields cause a server error.

Only forged forms contain such values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib.admin.widgets import AutocompleteSelect
from django.core.exceptions import ValidationError
from django.forms.fields import InvalidJSONInput
from unfold.mixins import BaseModelAdminMixin

# More brackets than any JWKS has. Even if all are nested, the JSON decoder does not reach Python's recursion limit.
MAX_BRACKETS = 400


class SafeAutocompleteSelect(AutocompleteSelect):
    """An autocomplete field that ignores submitted values that cannot be a primary key.

    To show a rejected form again, Django's widget looks up each submitted value. For these the lookup would cause a
    server error.
    """

    def optgroups(self, name: str, value: Sequence[str], attr: dict[str, Any] | None = None) -> Any:
        return super().optgroups(name, [key for key in value if self._is_key(key)], attr)

    def _is_key(self, text: str) -> bool:
        try:
            self.field.target_field.clean(text, None)
        except ValidationError:
            return False
        return "\0" not in text  # PostgreSQL rejects it


class SafeAutocomplete(BaseModelAdminMixin):
    """A mixin that uses SafeAutocompleteSelect for `autocomplete_fields`."""

    def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = SafeAutocompleteSelect(db_field, self.admin_site, using=kwargs.get("using"))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)


class JwksDecoder(json.JSONDecoder):
    """Decode only JSON that PostgreSQL can store: without NaN, NUL and lone surrogates."""

    def decode(self, s: str, *args: Any) -> Any:
        try:
            if s.count("[") + s.count("{") > MAX_BRACKETS:
                raise ValueError("too many brackets")
            decoded = super().decode(s, *args)
            if b"\\u0000" in json.dumps(decoded, ensure_ascii=False, allow_nan=False).encode():
                raise ValueError("a string contains NUL")
        except ValueError as error:  # also for a number with more digits than Python converts
            raise json.JSONDecodeError(str(error), s, 0) from error
        return decoded


class JwksField(forms.JSONField):
    """A JSON field for a JWKS.

    It shows an empty text, not `null`, if there are no keys, and invalid input as it was sent.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "decoder": JwksDecoder})

    def prepare_value(self, value: Any) -> Any:
        return "" if value is None else super().prepare_value(value)

    def bound_data(self, data: Any, initial: Any) -> Any:
        return initial if self.disabled else InvalidJSONInput(data or "")
