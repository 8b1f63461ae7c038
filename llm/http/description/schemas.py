"""JSON schemas of what requests hold and answers are, where their types alone do not tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
TEXT: Final[Schema] = {"type": "string", "minLength": 1}
INTEGER: Final[Schema] = {"type": "integer"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
NULL: Final[Schema] = {"type": "null"}
OBJECT: Final[Schema] = {"type": "object"}


def ref(name: str) -> Schema:
    """The schema of a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*values: str) -> Schema:
    """One of some texts."""
    return {"type": "string", "enum": [*values]}


def array(items: Schema, least: int = 0) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def either(*schemas: Schema) -> Schema:
    """One of some schemas."""
    return {"anyOf": [*schemas]}


def optional(schema: Schema) -> Schema:
    """Something, or null."""
    return either(schema, NULL)


def record(fields: Mapping[str, Schema], others: Mapping[str, Schema] | None = None) -> Schema:
    """An object.

    Args:
        fields: that it always has.
        others: that it may have.
    """
    return {
        "type": "object",
        "properties": {**fields, **(others or {})},
        **({"required": [*fields]} if fields else {}),
    }


# Requests ---------------------------------------------------------------------------------------

_TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}

_TEXT_PART: Final = record({"type": one_of("text"), "text": STRING})
_CALL: Final = record(
    {
        "id": STRING,
        "type": one_of("function"),
        "function": record({"name": STRING, "arguments": STRING}),
    }
)
_CONTENT: Final = either(STRING, array(_TEXT_PART, 1))

_PROMPTS: Final = either(
    STRING, array(STRING, 1), array(_TOKEN_ID, 1), array(array(_TOKEN_ID, 1), 1)
)
_FUNCTION: Final = record(
    {"name": _NAME}, {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN}
)

_RESULT: Final = record(
    {"type": one_of("tool_result"), "tool_use_id": STRING},
    {"content": _CONTENT, "is_error": BOOLEAN},
)
_USE: Final = record({"type": one_of("tool_use"), "id": STRING, "name": STRING, "input": OBJECT})
_THINKING: Final = record({"type": one_of("thinking"), "thinking": STRING})

_DOCUMENT: Final = either(TEXT, record({"text": TEXT}))
_DOCUMENTS: Final = either(_DOCUMENT, array(_DOCUMENT, 1))

REQUESTS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "CommonRequest": {
        "stop": optional(either(TEXT, {**array(TEXT), "maxItems": 4})),
        "logit_bias": optional(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,6}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        ),
    },
    "ChatRequest": {
        "messages": array(
            either(
                record({"role": one_of("system", "developer", "user"), "content": _CONTENT}),
                record(
                    {"role": one_of("assistant"), "content": optional(_CONTENT)},
                    {"tool_calls": array(_CALL), "reasoning_content": STRING},
                ),
                record(
                    {"role": one_of("tool"), "tool_call_id": STRING, "content": _CONTENT},
                ),
            ),
            1,
        ),
        "tools": optional(array(record({"type": one_of("function"), "function": _FUNCTION}))),
        "tool_choice": optional(
            either(
                one_of("none", "auto", "required"),
                record({"type": one_of("function"), "function": record({"name": STRING})}),
            )
        ),
        "response_format": optional(
            either(
                record({"type": one_of("text", "json_object")}),
                record(
                    {
                        "type": one_of("json_schema"),
                        "json_schema": record(
                            {"name": _NAME, "schema": OBJECT}, {"strict": BOOLEAN}
                        ),
                    }
                ),
            )
        ),
    },
    "CompletionRequest": {
        "prompt": _PROMPTS,
    },
    "EmbeddingsRequest": {"input": _PROMPTS},
    "ScoreRequest": dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "items"), optional(_DOCUMENTS)
    ),
    "RerankRequest": {"documents": _DOCUMENTS},
    "ResponsesRequest": {
        "input": either(
            STRING,
            array(
                either(
                    record(
                        {
                            "role": one_of("user", "assistant", "system", "developer"),
                            "content": either(
                                STRING,
                                array(
                                    record(
                                        {
                                            "type": one_of("input_text", "output_text"),
                                            "text": STRING,
                                        }
                                    ),
                                    1,
                                ),
                            ),
                        },
                        {"type": one_of("message")},
                    ),
                    record(
                        {
                            "type": one_of("function_call"),
                            "call_id": STRING,
                            "name": STRING,
                            "arguments": STRING,
                        }
                    ),
                    record(
                        {
                            "type": one_of("function_call_output"),
                            "call_id": STRING,
                            "output": STRING,
                        }
                    ),
                    record(
                        {"type": one_of("reasoning")},
                        {
                            "summary": array(record({"text": STRING})),
                            "content": array(record({"text": STRING})),
                        },
                    ),
                ),
                1,
            ),
        ),
        "tools": optional(
            array(
                record(
                    {"type": one_of("function"), "name": _NAME},
                    {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN},
                )
            )
        ),
        "tool_choice": optional(
            either(
                one_of("none", "auto", "required"),
                record({"type": one_of("function"), "name": STRING}),
            )
        ),
        "text": optional(
            record(
                {},
                {
                    "format": optional(
                        either(
                            record({"type": one_of("text", "json_object")}),
                            record(
                                {"type": one_of("json_schema"), "name": _NAME, "schema": OBJECT},
                                {"strict": BOOLEAN},
                            ),
                        )
                    )
                },
            )
        ),
        "background": optional({"const": False}),
        "previous_response_id": NULL,
        "conversation": NULL,
        "prompt": NULL,
    },
    "ConversationRequest": {
        "messages": array(
            either(
                record(
                    {
                        "role": one_of("user"),
                        "content": either(STRING, array(either(_TEXT_PART, _RESULT), 1)),
                    }
                ),
                record(
                    {
                        "role": one_of("assistant"),
                        "content": either(STRING, array(either(_TEXT_PART, _USE, _THINKING), 1)),
                    }
                ),
            ),
            1,
        ),
        "system": optional(either(STRING, array(_TEXT_PART))),
        "tools": optional(
            array(record({"name": _NAME, "input_schema": OBJECT}, {"description": STRING}))
        ),
        "tool_choice": optional(
            either(
                record({"type": one_of("auto", "any", "none")}),
                record({"type": one_of("tool"), "name": STRING}),
            )
        ),
        "thinking": optional(record({"type": one_of("enabled", "disabled", "adaptive")})),
        "output_config": optional(
            record(
                {},
                {
                    "effort": optional(one_of("low", "medium", "high", "xhigh", "max")),
                    "format": optional(record({"type": one_of("json_schema"), "schema": OBJECT})),
                },
            )
        ),
        "container": NULL,
        "thread": NULL,
        "mcp_servers": optional({"type": "array", "maxItems": 0}),
    },
    "MessagesRequest": {"stop_sequences": optional(array(TEXT))},
}
"""Fields of requests, by the type that has them; those of its bases hold for it too."""
UNDESCRIBED: Final = frozenset(("chat_template", "modalities", "suffix"))
"""Fields that only some engines of text know."""

CONDITIONS: Final[Mapping[str, Schema]] = {
    name: {
        "if": {
            "required": ["tool_choice"],
            "properties": {"tool_choice": {"not": {"enum": [None, "none", "auto"]}}},
        },
        "then": {
            "required": ["tools"],
            "properties": {"tools": {"type": "array", "minItems": 1}},
        },
    }
    for name in ("ChatRequest", "ResponsesRequest")
} | {
    "TokenizeRequest": {
        "oneOf": [
            {"required": [name], "properties": {name: {"not": NULL}, other: NULL}}
            for name, other in (("prompt", "messages"), ("messages", "prompt"))
        ]
    }
}
"""The conditions on several fields of a request at once."""


# Answers ----------------------------------------------------------------------------------------

_FINISH: Final = optional(one_of("stop", "length", "tool_calls", "content_filter"))
_TOKEN: Final = record(
    {"token": STRING, "logprob": NUMBER, "bytes": optional(array(COUNT))},
    {"top_logprobs": array(OBJECT)},
)
_USAGE: Final = optional(
    record(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        {
            "prompt_tokens_details": optional(record({"cached_tokens": optional(COUNT)})),
            "sampler_restarted": BOOLEAN,
        },
    )
)


def _completion(kind: str, choice: Schema) -> Schema:
    return record(
        {
            "id": STRING,
            "object": one_of(kind),
            "created": INTEGER,
            "model": STRING,
            "choices": array(choice),
            "usage": _USAGE,
        }
    )


_ITEM: Final = either(
    record(
        {
            "type": one_of("message"),
            "id": STRING,
            "status": STRING,
            "role": one_of("assistant"),
            "content": array(record({"type": one_of("output_text"), "text": STRING})),
        }
    ),
    record({"type": one_of("reasoning"), "id": STRING, "summary": array(OBJECT)}),
    record(
        {
            "type": one_of("function_call"),
            "id": STRING,
            "call_id": STRING,
            "name": STRING,
            "arguments": STRING,
        }
    ),
)

ANSWERS: Final[Mapping[str, Schema]] = {
    "ChatCompletion": _completion(
        "chat.completion",
        record(
            {
                "index": COUNT,
                "message": record(
                    {"role": one_of("assistant"), "content": optional(STRING)},
                    {"reasoning_content": optional(STRING), "tool_calls": optional(array(_CALL))},
                ),
                "finish_reason": _FINISH,
            },
            {"logprobs": optional(record({"content": optional(array(_TOKEN))}))},
        ),
    ),
    "Completion": _completion(
        "text_completion",
        record(
            {"index": COUNT, "text": STRING, "finish_reason": _FINISH},
            {"logprobs": optional(OBJECT)},
        ),
    ),
    "Response": record(
        {
            "id": STRING,
            "object": one_of("response"),
            "created_at": INTEGER,
            "status": one_of("completed", "incomplete"),
            "error": NULL,
            "incomplete_details": optional(record({"reason": STRING})),
            "model": STRING,
            "output": array(_ITEM),
            "tools": array(OBJECT),
            "usage": optional(
                record({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})
            ),
        }
    ),
    "Message": record(
        {
            "id": STRING,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": STRING,
            "content": array(
                either(
                    record({"type": one_of("text"), "text": STRING}),
                    record({"type": one_of("thinking"), "thinking": STRING, "signature": STRING}),
                    record(
                        {
                            "type": one_of("tool_use"),
                            "id": STRING,
                            "name": STRING,
                            "input": OBJECT,
                        }
                    ),
                )
            ),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": optional(STRING),
            "usage": record(
                {
                    "input_tokens": COUNT,
                    "output_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                }
            ),
        }
    ),
    "TokenCount": record({"input_tokens": COUNT}),
    "InputTokens": record({"object": one_of("response.input_tokens"), "input_tokens": COUNT}),
    "Embeddings": record(
        {
            "object": one_of("list"),
            "model": STRING,
            "data": array(
                record(
                    {
                        "object": one_of("embedding"),
                        "index": COUNT,
                        "embedding": either(array(NUMBER), STRING),
                    }
                )
            ),
            "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Scores": record(
        {
            "id": STRING,
            "object": one_of("list"),
            "created": INTEGER,
            "model": STRING,
            "data": array(record({"index": COUNT, "object": one_of("score"), "score": NUMBER})),
            "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Ranked": record(
        {
            "id": STRING,
            "model": STRING,
            "results": array(
                record(
                    {"index": COUNT, "relevance_score": NUMBER},
                    {"document": record({"text": STRING})},
                )
            ),
            "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Model": record(
        {"id": STRING, "object": one_of("model"), "created": INTEGER, "owned_by": STRING},
        {"max_model_len": COUNT},
    ),
    "ModelList": record({"object": one_of("list"), "data": array(ref("Model"))}),
    "Health": record({"status": one_of("ok")}),
    "Ready": record({"status": one_of("ok"), "models": COUNT}, {"warning": STRING}),
    "NotReady": record({"status": one_of("unavailable"), "reason": STRING}),
    "Error": record(
        {
            "error": record(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": optional(STRING),
                    "code": optional(STRING),
                },
                {"request_id": optional(STRING)},
            )
        }
    ),
    "MessagesError": record(
        {
            "type": one_of("error"),
            "error": record({"type": STRING, "message": STRING}),
            "request_id": optional(STRING),
        }
    ),
}
"""The schemas of answers, by name."""
