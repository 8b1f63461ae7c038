"""The tools of a chat: which a model may call, which it has to, and the form that this enforces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from .errors import BadRequest, misfit, unsupported
from .fields import fields_of, is_array, is_object, items_of

MAX_TOOLS: Final = 512
MAX_NAME: Final = 256

Tool = Mapping[str, Any]
"""As a request has it: an object with `type` and `function`."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that a model may use, and how.

    Attributes:
        tools: that it is told of; none where it shall call none.
        choice: whether it decides itself, has to call at least one, or the one that is `named`.
        named: the function that it has to call; empty where it is not that.
        one_call: whether it may call only one.
    """

    tools: Sequence[Tool] = ()
    choice: Literal["auto", "required", "named"] = "auto"
    named: str = ""
    one_call: bool = False

    @property
    def is_forced(self) -> bool:
        """True if the model has to call a tool."""
        return self.choice != "auto"

    def forced_schema(self) -> dict[str, Any]:
        """The form of an output that calls what has to be called: the arguments of the function
        that is named, or an array of objects with `name` and `parameters`.

        Raises:
            BadRequest: the parameters of a function are no object, or nested too deeply.
        """
        if self.choice == "named":
            names = [function["name"] for function in self._functions]
            return self._parameters(names.index(self.named))
        return {
            "type": "array",
            "minItems": 1,
            **({"maxItems": 1} if self.one_call else {}),
            "items": {"anyOf": self._calls("parameters")},
            "$defs": self._definitions(),
        }

    def call_schema(self, arguments: str) -> dict[str, Any]:
        """The form of a call as an object: its `name`, and its arguments under a name of theirs.

        Raises:
            BadRequest: the parameters of a function are no object, or nested too deeply.
        """
        return {"anyOf": self._calls(arguments), "$defs": self._definitions()}

    def answer_or_call_schema(self, answer: dict[str, Any], arguments: str) -> dict[str, Any]:
        """The form of an answer, or of a call as in `call_schema`.

        Raises:
            BadRequest: a schema is nested too deeply, or a function takes no object.
        """
        moved = _moved(answer, "#/$defs/answer", "response_format")
        return {
            "anyOf": [{"$ref": "#/$defs/answer"}, *self._calls(arguments)],
            "$defs": {"answer": moved, **self._definitions()},
        }

    @property
    def _functions(self) -> list[Mapping[str, Any]]:
        return [tool["function"] for tool in self.tools]

    def _calls(self, arguments: str) -> list[dict[str, Any]]:
        return [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    arguments: {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for place, function in enumerate(self._functions)
        ]

    def _definitions(self) -> dict[str, Any]:
        return {
            str(place): _moved(self._parameters(place), f"#/$defs/{place}", _where(place))
            for place in range(len(self.tools))
        }

    def _parameters(self, place: int) -> dict[str, Any]:
        """The schema of a function's arguments, which always are an object."""
        parameters: dict[str, Any] | None = self._functions[place].get("parameters")
        if not parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        kind: object = parameters.get("type", "object")
        if kind != "object" and "object" not in items_of(kind):
            raise misfit(
                _where(place), "arguments are an object: give a schema of the type 'object'"
            )
        return {**parameters, "type": "object"}


def tool_use(
    tools: Sequence[Any] | None, tool_choice: object, parallel_tool_calls: bool | None
) -> ToolUse:
    """The use of tools that the fields of a request say.

    Raises:
        BadRequest: they do not fit, or ask for what is not done here.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        raise misfit("tools", f"{len(tools)} are too many; at most {MAX_TOOLS} are taken")
    checked = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools or ())]
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise misfit("tools", f"two functions are called {twice!r}; give each a name of its own")
    one_call = parallel_tool_calls is False
    if tool_choice == "none":
        return ToolUse()
    if tool_choice in (None, "auto"):
        return ToolUse(checked, one_call=one_call)
    if not checked:
        raise misfit("tool_choice", "there are no tools; give some, or leave tool_choice out")
    if tool_choice == "required":
        return ToolUse(checked, "required", one_call=one_call)
    return _chosen(checked, tool_choice, one_call=one_call)


def _chosen(tools: Sequence[Tool], choice: object, *, one_call: bool) -> ToolUse:
    fields = fields_of(choice)
    kind = fields.get("type")
    if kind == "function":
        name = _name(fields.get("function"), "tool_choice.function")
        _only(tools, [name], "tool_choice.function.name")
        return ToolUse(tools, "named", name, one_call=True)
    if kind == "allowed_tools":
        return _allowed(tools, fields.get("allowed_tools"), one_call=one_call)
    if isinstance(kind, str):
        raise unsupported("tool_choice", f"the type {kind[:40]!r} is not supported, only functions")
    raise misfit(
        "tool_choice",
        "give 'none', 'auto', 'required', or "
        "{'type': 'function', 'function': {'name': '...'}} for one of the tools",
    )


def _allowed(tools: Sequence[Tool], given: object, *, one_call: bool) -> ToolUse:
    where = "tool_choice.allowed_tools"
    fields = fields_of(given)
    mode, listed = fields.get("mode"), items_of(fields.get("tools"))
    if mode not in ("auto", "required") or not listed:
        raise misfit(where, "give a mode, 'auto' or 'required', and the tools that it is for")
    names = [
        _name(fields_of(entry).get("function"), f"{where}.tools[{place}].function")
        for place, entry in enumerate(listed)
    ]
    allowed = _only(tools, names, f"{where}.tools")
    return ToolUse(allowed, "auto" if mode == "auto" else "required", one_call=one_call)


def _only(tools: Sequence[Tool], names: Sequence[str], where: str) -> list[Tool]:
    """The tools with some names."""
    known = {tool["function"]["name"] for tool in tools}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise BadRequest(
            f"{where}: there is no tool {unknown[:80]!r}; the tools are: "
            f"{', '.join(sorted(known))[:400]}",
            param=where,
        )
    wanted = set(names)
    return [tool for tool in tools if tool["function"]["name"] in wanted]


def _tool(given: object, where: str) -> Tool:
    if not is_object(given):
        raise misfit(where, "give {'type': 'function', 'function': {'name': '...', ...}}")
    kind = given.get("type")
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{where}.type", f"{kind[:40]!r} is not supported, only 'function'")
    if kind is None:
        raise misfit(f"{where}.type", "give 'function'")
    function = given.get("function")
    _name(function, f"{where}.function")
    fields = fields_of(function)
    for name, wanted, called in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema of an object"),
    ):
        value: object = fields.get(name)
        if value is not None and not isinstance(value, wanted):
            raise misfit(f"{where}.function.{name}", f"give {called}, or leave it out")
    return given


def _name(function: object, where: str) -> str:
    name: object = fields_of(function).get("name")
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
        return name
    raise misfit(f"{where}.name", f"give the name of a function, 1 to {MAX_NAME} characters")


def _where(place: int) -> str:
    return f"tools[{place}].function.parameters"


_DATA: Final = frozenset(("const", "enum", "default", "examples"))
"""The keywords whose values are no schemas."""
_NAMED: Final = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)
"""The keywords whose values have schemas under names that anybody may choose."""


def _moved(schema: dict[str, Any], to: str, where: str) -> dict[str, Any]:
    """A schema whose references hold at another place of a document.

    Args:
        where: the field that it comes from.
    """

    def moved(value: object) -> object:
        if is_array(value):
            return [moved(one) for one in value]
        if not is_object(value):
            return value
        return {name: moved_under(name, one) for name, one in value.items()}

    def moved_under(name: str, value: object) -> object:
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            return to + value[1:]
        if name in _DATA:
            return value
        if name in _NAMED and is_object(value):
            return {chosen: moved(one) for chosen, one in value.items()}
        return moved(value)

    try:
        return fields_of(moved(schema))
    except RecursionError:
        raise misfit(where, "it is nested too deeply: flatten it, for example by $defs") from None
