"""The checks of an engine's requests, made before anything is computed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.embedding import EmbedRequest
from dynbus.llm.generation import MAX_LOGPROBS, GenerateRequest, Sampling
from dynbus.llm.structured import check_structured

from .interface import ANY_TOKENS, EngineLimits

MAX_CONTINUATIONS: Final = 128
"""The number of continuations of a prompt that a request may ask for."""

_SEEDS: Final = 1 << 64


def check_request(request: GenerateRequest, limits: EngineLimits) -> NDArray[np.uint32]:
    """Check what the engine's size does not decide.

    Returns:
        The prompt as an array, of shape [tokens].

    Raises:
        ValueError: a value is not usable: which, and what to give.
    """
    prompt = _tokens(request.token_ids, limits)
    _check_tokens("stop_token_ids", request.stop_token_ids, limits)
    most = request.max_tokens
    if most is not None and most < 1:
        raise ValueError(f"max_tokens = {most}: a request gets one token at least")
    if request.min_tokens < 0:
        raise ValueError(f"min_tokens = {request.min_tokens}: it is 0 or more")
    if most is not None and request.min_tokens > most:
        raise ValueError(
            f"min_tokens = {request.min_tokens} is more than max_tokens = {most}: lower it"
        )
    if not 1 <= request.n <= MAX_CONTINUATIONS:
        raise ValueError(f"n = {request.n}: ask for 1 to {MAX_CONTINUATIONS} continuations")
    if not 0 <= request.index <= MAX_CONTINUATIONS - request.n:
        raise ValueError(
            f"index = {request.index}: it is from 0 to {MAX_CONTINUATIONS - request.n}"
        )
    length = len(request.token_ids)
    if not 0 <= request.generated < length:
        raise ValueError(
            f"generated = {request.generated}: of {length} token_ids it is from 0 to {length - 1}"
        )
    _check_sampling(request.sampling, limits)
    if request.structured is not None:
        check_structured(request.structured)
    return prompt


def check_embedding(
    request: EmbedRequest, limits: EngineLimits, state_size: int | None = None
) -> NDArray[np.uint32]:
    """Check what the engine's size does not decide.

    Args:
        state_size: the most dimensions that an embedding may have; None where the engine checks it.

    Returns:
        The text as an array, of shape [tokens].

    Raises:
        ValueError: a value is not usable: which, and what to give.
    """
    text = _tokens(request.token_ids, limits)
    dimensions = request.dimensions
    if dimensions is None or state_size is None:
        return text
    if not 1 <= dimensions <= state_size:
        raise ValueError(
            f"dimensions = {dimensions}: it is from 1 to {state_size}, which the model has"
        )
    return text


def _tokens(token_ids: Sequence[int], limits: EngineLimits) -> NDArray[np.uint32]:
    if not token_ids:
        raise ValueError("the prompt is empty: an engine needs one token at least")
    try:
        # Prompts are long: this takes a third of the time of a look at their numbers.
        prompt = np.frombuffer(array("I", token_ids), dtype=np.uint32)
    except OverflowError:
        prompt = None
    if prompt is None or int(prompt.max()) >= limits.vocabulary:
        _check_tokens("token_ids", token_ids, limits)
    assert prompt is not None, "the numbers fit"
    return prompt


def _check_tokens(name: str, token_ids: Collection[int], limits: EngineLimits) -> None:
    if not token_ids:
        return
    least, most = min(token_ids), max(token_ids)
    if least >= 0 and most < limits.vocabulary:
        return
    wrong = least if least < 0 else most
    if limits.vocabulary == ANY_TOKENS:
        raise ValueError(f"{name} has {wrong}, which is not from 0 to 2^32 - 1: send token ids")
    raise ValueError(
        f"{name} has {wrong}, which is not from 0 to {limits.vocabulary - 1}: send ids of the "
        "model's own tokenizer"
    )


def _check_sampling(sampling: Sampling, limits: EngineLimits) -> None:
    def check(name: str, usable: bool, remedy: str) -> None:
        if not usable:
            raise ValueError(f"{name} = {getattr(sampling, name)}: {remedy}")

    finite = math.isfinite
    temperature = sampling.temperature
    check("temperature", finite(temperature) and temperature >= 0.0, "it is 0 or more")
    check("top_k", sampling.top_k >= 0, "it is 1 or more, or 0 for all tokens")
    check("top_p", 0.0 < sampling.top_p <= 1.0, "it is above 0, and 1 at most")
    check("min_p", 0.0 <= sampling.min_p <= 1.0, "it is from 0 to 1")
    penalty = sampling.repetition_penalty
    check("repetition_penalty", finite(penalty) and penalty > 0.0, "it is above 0; 1 for none")
    check("frequency_penalty", finite(sampling.frequency_penalty), "it is a number; 0 for none")
    check("presence_penalty", finite(sampling.presence_penalty), "it is a number; 0 for none")
    if sampling.seed is not None:
        check("seed", -_SEEDS // 2 <= sampling.seed < _SEEDS, "it is from -2^63 to 2^64 - 1")
    if sampling.logprobs is not None:
        check("logprobs", 0 <= sampling.logprobs <= MAX_LOGPROBS, f"it is from 0 to {MAX_LOGPROBS}")
    if sampling.logit_bias:
        _check_tokens("logit_bias", sampling.logit_bias, limits)
        for token_id, bias in sampling.logit_bias.items():
            if not finite(bias):
                raise ValueError(f"logit_bias of token {token_id} = {bias}: it is a number")
