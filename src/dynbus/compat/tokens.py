"""Requests and items of token endpoints, as Dynamo's engines take and give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from dynbus import HandlerError, InvalidRequest

_FINISH_REASONS: Final = {"eos": "stop", "content_filter": "stop"}

_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
}
"""The sampling fields that both name alike, and the value where a request leaves one out."""

ALL_TOKENS: Final = -1
"""Dynamo's `top_k` for all, which is 0 in dynbus."""


class TokenTranslation:
    """Between `GenerateRequest` and `Generated`, and what Dynamo has in their place.

    Args:
        eos_token_ids: of the model that is served.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)

    def request(self, request: Any) -> Any:
        """The request with what Dynamo's engines read beside `token_ids`: `stop_conditions`,
        `sampling_options`, `output_options` and `eos_token_ids`.

        Raises:
            InvalidRequest: it is none.
        """
        if not isinstance(request, dict):
            raise InvalidRequest(
                f"a request for tokens is an object: {type(request).__name__} came"
            )
        given = cast("dict[str, Any]", request)
        if not isinstance(given.get("token_ids"), list):
            raise InvalidRequest("a request for tokens has a list token_ids")
        sampling: Mapping[str, Any] = given.get("sampling", {})
        return {
            **given,
            "stop_conditions": {
                "max_tokens": given.get("max_tokens"),
                "min_tokens": given.get("min_tokens", 0),
                "stop": given.get("stop"),
                "stop_token_ids_hidden": given.get("stop_token_ids"),
                "ignore_eos": given.get("ignore_eos", False),
            },
            "sampling_options": {
                "n": given.get("n", 1),
                "top_k": sampling.get("top_k", ALL_TOKENS),
                **{name: sampling.get(name, usual) for name, usual in _SAMPLING.items()},
                **_guided(given.get("structured")),
            },
            "output_options": {"logprobs": sampling.get("logprobs")},
            "eos_token_ids": self._eos_token_ids,
            "annotations": [],
        }

    def answer(self, item: Any) -> Any:
        """An item as `Generated` has it: what it leaves open is left out, finish reasons and
        log-probabilities are dynbus's.

        Raises:
            HandlerError: it says that the engine has failed.
        """
        if not isinstance(item, Mapping):
            return item
        given = cast("Mapping[str, Any]", item)
        made = {name: value for name, value in given.items() if value is not None}
        reason = made.get("finish_reason")
        if reason is not None:
            made["finish_reason"] = _finish_reason(reason)
        probabilities = made.pop("log_probs", None)
        top: list[Any] = made.pop("top_logprobs", [])
        if probabilities is not None and "logprobs" not in made:
            made["logprobs"] = [
                [token_id, probability, _top(top, place)]
                for place, (token_id, probability) in enumerate(
                    zip(made.get("token_ids", ()), probabilities, strict=False)
                )
            ]
        return made


def _guided(structured: Mapping[str, Any] | None) -> dict[str, Any]:
    """The form of an output, where there is one, by the names that Dynamo has for it."""
    if structured is None:
        return {}
    names = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    return {"guided_decoding": {name: structured.get(own) for name, own in names.items()}}


def _finish_reason(reason: Any) -> Any:
    error: Any = None
    if isinstance(reason, Mapping):
        error = cast("Mapping[str, Any]", reason).get("error")
    elif isinstance(reason, str):
        kind, _, text = reason.partition(":")
        if kind == "error":
            error = text.strip() or "it gave no reason"
        reason = _FINISH_REASONS.get(reason, reason)
    if error is not None:
        raise HandlerError(f"the engine has failed: {error}")
    return cast("Any", reason)


def _top(top: list[Any], place: int) -> list[tuple[int, float]]:
    """The likeliest tokens in one place, with their log-probabilities."""
    return [(one["token_id"], one["logprob"]) for one in top[place]] if place < len(top) else []
