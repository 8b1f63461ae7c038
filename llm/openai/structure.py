"""The form that an answer is to have, as requests say it: in OpenAI's field, or in vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynbus.llm.generation import StructuredOutput
from dynbus.llm.structured import MAX_BYTES, check_structured

from .errors import BadRequest, misfit
from .fields import is_object

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

_FORMS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""vLLM's names of the forms."""

_ANY_OBJECT: Final = {"type": "object"}


class StructureFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say the form of an answer: at most one of them does."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # The names that vLLM had before.
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def structured(self) -> StructuredOutput | None:
        """The form of the answer; None for any text.

        Raises:
            BadRequest: a form does not fit, is too large, or there are several.
        """
        forms = self._forms()
        if not forms:
            return None
        if len(forms) > 1:
            raise BadRequest(
                f"{' and '.join(forms)} each give a form: give one of them",
                param=list(forms)[-1],
            )
        ((param, form),) = forms.items()
        try:
            check_structured(form)
        except ValueError as error:
            raise BadRequest(f"{param}: {error}", param=param) from None
        return form

    @property
    def structured_by(self) -> str:
        """The field that gives the form; empty for none."""
        return next(iter(self._forms()), "")

    def _forms(self) -> dict[str, StructuredOutput]:
        forms: dict[str, StructuredOutput] = {}
        if self.response_format is not None:
            form = _response_format(self.response_format)
            if form is not None:
                forms["response_format"] = form
        if self.structured_outputs is not None:
            forms["structured_outputs"] = _structured_outputs(self.structured_outputs)
        for name in _FORMS:
            value = getattr(self, f"guided_{name}")
            if value is not None:
                forms[f"guided_{name}"] = _vllm_form(f"guided_{name}", name, value)
        return forms


def _response_format(given: Mapping[str, Any]) -> StructuredOutput | None:
    kind = given.get("type")
    own = given.get("schema")
    if own is not None and kind != "json_object":
        place = "in json_schema" if kind == "json_schema" else "with the type 'json_schema'"
        raise misfit("response_format.schema", f"give a schema {place}")
    if kind == "text":
        return None
    if kind == "json_object":
        # Other servers take a schema here, which OpenAI's has not.
        if own is not None and not is_object(own):
            raise misfit("response_format.schema", "give a JSON schema, or leave it out")
        return StructuredOutput(json_schema=dict(_ANY_OBJECT) if own is None else own)
    if kind != "json_schema":
        raise misfit("response_format.type", "give 'text', 'json_object' or 'json_schema'")
    described = given.get("json_schema")
    where = "response_format.json_schema"
    if not is_object(described):
        raise misfit(where, "give an object with a name and a schema")
    name = described.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise misfit(f"{where}.name", "give 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(described.get("strict"), bool | None):
        raise misfit(f"{where}.strict", "give true or false")
    schema = described.get("schema", _ANY_OBJECT)
    if not is_object(schema):
        raise misfit(f"{where}.schema", "give a JSON schema")
    return StructuredOutput(json_schema=schema)


def _structured_outputs(given: Mapping[str, Any]) -> StructuredOutput:
    where = "structured_outputs"
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    if asked.pop("json_object", None):
        asked["json"] = _ANY_OBJECT
    if len(asked) != 1 or not asked.keys() <= _FORMS.keys():
        raise misfit(where, f"give exactly one of {', '.join(_FORMS)} and json_object")
    ((name, value),) = asked.items()
    return _vllm_form(f"{where}.{name}", name, value)


def _vllm_form(where: str, name: str, value: Any) -> StructuredOutput:
    if name == "json" and isinstance(value, str):
        if len(value) > MAX_BYTES:
            raise misfit(where, f"it has {len(value)} characters: at most {MAX_BYTES} are taken")
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise misfit(where, f"it is not JSON: {error}") from None
    try:
        return msgspec.convert({_FORMS[name]: value}, StructuredOutput)
    except msgspec.ValidationError:
        wanted = {"json": "a JSON schema", "choice": "a list of strings"}
        raise misfit(where, f"give {wanted.get(name, 'a string')}") from None
