"""Requests as vLLM takes them, and what it makes for them as items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import (
    FinishReason,
    Generated,
    GenerateRequest,
    StructuredOutput,
    TokenLogprob,
)

from .starting import vllm_module

FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    # Its last tokens were always the same.
    "repetition": "stop",
}


class PromptRequest(GenerateRequest, frozen=True):
    """A request whose prompt is computed here, and its first token, for an engine that reads the
    KV cache of it and goes on."""


class ReadingRequest(GenerateRequest, frozen=True):
    """A request whose prompt another engine has computed.

    Attributes:
        kv_transfer_params: where that holds the KV cache, as its vLLM says it; to be used once.
            None where it is computed here after all.
        held_until: when it may hold it no longer, by `time.monotonic` of this machine.
        shown: the first token, which was sent already; None where it was not.
    """

    kv_transfer_params: dict[str, Any] | None = None
    held_until: float = 0.0
    shown: int | None = None


def sampling_params(request: GenerateRequest, number: int, report: str | None) -> Any:
    """vLLM's parameters for one continuation.

    Raises:
        VLLMClientError: a value is not usable.
    """
    sampling, module = request.sampling, vllm_module("sampling_params")
    most, least = request.max_tokens, request.min_tokens
    if isinstance(request, PromptRequest):
        most, least = 1, min(1, least)
    extra = {} if report is None else {"kv_cache_report_mode": report}
    return module.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        # The draws begin with a request: what continues another one begins with others.
        seed=None
        if sampling.seed is None
        else sampling.seed + request.index + number + request.generated,
        logit_bias=sampling.logit_bias or None,
        logprobs=sampling.logprobs,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        max_tokens=most,
        min_tokens=least,
        # The front end turns tokens into text, and applies stop strings to it.
        detokenize=False,
        output_kind=module.RequestOutputKind.DELTA,
        extra_args={**extra, **_transfer(request)} or None,
        structured_outputs=_structured(module, request.structured),
    )


def _transfer(request: GenerateRequest) -> dict[str, Any]:
    """The parameters of a request for vLLM's connector."""
    if isinstance(request, PromptRequest):
        return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    if isinstance(request, ReadingRequest) and request.kv_transfer_params is not None:
        params = {**request.kv_transfer_params, "remote_blocks_expiry_time": request.held_until}
        # What was in the cache of that engine is not what was in this one's.
        params.pop("remote_prefill_cached_tokens", None)
        return {"kv_transfer_params": params}
    return {}


def _structured(module: Any, structured: StructuredOutput | None) -> Any:
    """The form of an output as vLLM takes it. What may be thought before, its own parser of
    reasoning tells, where it is started with one."""
    if structured is None:
        return None
    schema = structured.json_schema
    return module.StructuredOutputsParams(
        # It takes no schema that is true or false.
        json={} if schema is True else {"not": {}} if schema is False else schema,
        regex=structured.regex,
        choice=structured.choice,
        grammar=structured.grammar,
    )


class Pooling(NamedTuple):
    """The output of an engine that makes no tokens.

    Attributes:
        scores: whether it makes scores of pairs of texts, and no embeddings.
        tells_texts_apart: whether its model is told which tokens are of the second text.
    """

    scores: bool
    tells_texts_apart: bool = False


def pooling_params(request: EmbedRequest, pooling: Pooling) -> Any:
    """vLLM's parameters for the embedding of a text, or the score of a pair of texts."""
    params = vllm_module("pooling_params").PoolingParams
    if not pooling.scores:
        return params(task="embed", dimensions=request.dimensions)
    made = params(task="classify")
    if pooling.tells_texts_apart and request.second_from is not None:
        made.extra_kwargs = {"compressed_token_type_ids": request.second_from}
    return made


def embedded(output: Any) -> Embedded:
    """The embedding or the score that vLLM has made, a `PoolingRequestOutput`."""
    numbers: Any = output.outputs.data.float().cpu().numpy()
    return Embedded(numbers.astype("<f4", copy=False).tobytes(), output.num_cached_tokens or 0)


def generated(made: Any, request: GenerateRequest, index: int, cached: int | None) -> Generated:
    """Convert a `CompletionOutput`, vLLM's output of one continuation, to an item.

    Args:
        cached: tokens of the prompt that were found in the cache; None but for the first item.
    """
    reason = made.finish_reason
    return Generated(
        list(made.token_ids),
        index,
        None if made.logprobs is None else _logprobs(made, request),
        None if reason is None else FINISH_REASONS[reason],
        cached,
    )


def _logprobs(made: Any, request: GenerateRequest) -> list[TokenLogprob]:
    wanted = request.sampling.logprobs or 0
    logprobs: list[TokenLogprob] = []
    for token_id, each in zip(made.token_ids, made.logprobs, strict=True):
        likeliest = sorted(each.items(), key=lambda one: -one[1].logprob)[:wanted]
        top = [(one, value.logprob) for one, value in likeliest]
        logprobs.append(TokenLogprob(token_id, each[token_id].logprob, top))
    return logprobs
