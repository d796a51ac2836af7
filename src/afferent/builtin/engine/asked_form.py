"""Response format of an answer: one type for the fields of `Sampling`."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import InvalidForm
from afferent.types import FormField, Sampling, encode

_TAG = b"afferent/form/v1"


class Form(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Response format of an answer.

    Attributes:
        kind: Name of the field of `Sampling`.
        text: A schema, an expression, a list of texts as JSON, or a `ToolForm` as JSON.
        answer: With tools: the format of an answer without calls.
    """

    kind: FormField
    text: str
    answer: Form | None = None

    @property
    def key(self) -> bytes:
        """Key that is equal for equal formats."""
        return keys.frame(_TAG, encode(self))


def form_of(sampling: Sampling) -> Form | None:
    """Return the response format of a request; ``None``: an answer may be anything.

    Raises:
        InvalidForm: The request has two formats.
    """
    forms: list[Form] = []
    if sampling.json_schema is not None:
        forms.append(Form("json_schema", sampling.json_schema))
    if sampling.regex is not None:
        forms.append(Form("regex", sampling.regex))
    if sampling.choice:
        forms.append(Form("choice", msgspec.json.encode(sampling.choice).decode()))
    if len(forms) > 1:
        raise InvalidForm("an answer has one form")
    form = forms[0] if forms else None
    return form if sampling.tools is None else Form("tools", sampling.tools, form)
