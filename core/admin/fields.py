"""Fields of the console's forms which refuse on the page what Django's own crash on; only forged forms send it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib.admin.widgets import AutocompleteSelect
from django.core.exceptions import ValidationError
from django.forms.fields import InvalidJSONInput
from unfold.mixins import BaseModelAdminMixin

# More than a set of keys has; as many within each other still leave Python's stack room.
BRACKETS = 400


class SafeAutocompleteSelect(AutocompleteSelect):
    """Django looks up what was sent to show it again, also what can be no row's key."""

    def optgroups(self, name: str, value: Sequence[str], attr: dict[str, Any] | None = None) -> Any:
        return super().optgroups(name, [each for each in value if self._is_key(each)], attr)

    def _is_key(self, sent: str) -> bool:
        try:
            self.field.target_field.clean(sent, None)
        except ValidationError:
            return False
        return "\0" not in sent  # PostgreSQL takes none in a text


class SafeAutocomplete(BaseModelAdminMixin):
    """A form whose `autocomplete_fields` are of that kind."""

    def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = SafeAutocompleteSelect(db_field, self.admin_site, using=kwargs.get("using"))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)


class JwksDecoder(json.JSONDecoder):
    """Takes what can be kept as well: PostgreSQL's JSON knows neither NaN, nor NUL, nor half a surrogate pair."""

    def decode(self, s: str, *args: Any) -> Any:
        try:
            if s.count("[") + s.count("{") > BRACKETS:
                raise ValueError("too many brackets")
            read = super().decode(s, *args)
            if b"\\u0000" in json.dumps(read, ensure_ascii=False, allow_nan=False).encode():
                raise ValueError("a NUL in a text")
        except ValueError as error:  # also a number of more digits than Python reads
            raise json.JSONDecodeError(str(error), s, 0) from error
        return read


class JwksField(forms.JSONField):
    """Of no keys the form says nothing, and not `null`; what was sent it shows as it was sent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "decoder": JwksDecoder})

    def prepare_value(self, value: Any) -> Any:
        return "" if value is None else super().prepare_value(value)

    def bound_data(self, data: Any, initial: Any) -> Any:
        return initial if self.disabled else InvalidJSONInput(data or "")
