"""Language models on the bus: their engines, and the front end that people and programs ask.

Programs serve models with `Frontend`, `Processor` and the workers (`ModelWorker`, `VllmWorker`,
`OpenAiWorker`, `MockWorker`); engines of one's own are written with `EngineWorker` and what stands
beside it. Each name is imported when it is first asked for, and only then needs its extra.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .calling.client import ModelClient
    from .calling.fake import FakeModel, tool_call
    from .calling.model import Model
    from .calling.stream import ModelStream
    from .disaggregated.roles import RoleChange, RoleState
    from .disaggregated.worker import DisaggregatedWorker
    from .embedding import Embedded, EmbedRequest
    from .engine.interface import (
        BlockTier,
        Engine,
        EngineLimits,
        EngineLoad,
        Held,
        Listener,
        LoadMetrics,
        Prefill,
        RequestTooLong,
        RunningEngine,
        Step,
        StepFailed,
        Stepper,
        TransferringEngine,
    )
    from .engine.model import Chunk, EmbeddingModel, PagedModel
    from .engine.model_engine import ModelEngine
    from .engine.worker import EngineWorker
    from .generation import (
        DefaultSampling,
        Generated,
        GenerateRequest,
        Sampling,
        StructuredOutput,
        Thinking,
        TokenLogprob,
    )
    from .hand_over.sink import Limits
    from .http.frontend import Frontend
    from .mock.tiny_model import write_tiny_model
    from .mock.worker import MockWorker
    from .models.card import ModelCard, ModelInput, ModelType
    from .models.catalog import Catalog
    from .models.origins import ModelUnavailable
    from .models.register import register_adapter, register_llm
    from .models.source import LocalModel
    from .openai.typed import Chat, Completion, Message
    from .pipeline.model_router import ModelRouter
    from .pipeline.processor import Processor
    from .proxy.worker import OpenAiWorker
    from .served_model import ServedModel, ServedModelOptions
    from .small.engine import SmallConfig, SmallEngine
    from .text.text_model import TextModel
    from .text.tokenizer import Tokenizer
    from .vllm.worker import Adapter, AdapterAt, VllmWorker
    from .worker import ModelWorker, SmallWorker

__all__ = [
    "Adapter",
    "AdapterAt",
    "BlockTier",
    "Catalog",
    "Chat",
    "Chunk",
    "Completion",
    "DefaultSampling",
    "DisaggregatedWorker",
    "EmbedRequest",
    "Embedded",
    "EmbeddingModel",
    "Engine",
    "EngineLimits",
    "EngineLoad",
    "EngineWorker",
    "FakeModel",
    "Frontend",
    "GenerateRequest",
    "Generated",
    "Held",
    "Limits",
    "Listener",
    "LoadMetrics",
    "LocalModel",
    "Message",
    "MockWorker",
    "Model",
    "ModelCard",
    "ModelClient",
    "ModelEngine",
    "ModelInput",
    "ModelRouter",
    "ModelStream",
    "ModelType",
    "ModelUnavailable",
    "ModelWorker",
    "OpenAiWorker",
    "PagedModel",
    "Prefill",
    "Processor",
    "RequestTooLong",
    "RoleChange",
    "RoleState",
    "RunningEngine",
    "Sampling",
    "ServedModel",
    "ServedModelOptions",
    "SmallConfig",
    "SmallEngine",
    "SmallWorker",
    "Step",
    "StepFailed",
    "Stepper",
    "StructuredOutput",
    "TextModel",
    "Thinking",
    "TokenLogprob",
    "Tokenizer",
    "TransferringEngine",
    "VllmWorker",
    "register_adapter",
    "register_llm",
    "tool_call",
    "write_tiny_model",
]

if not TYPE_CHECKING:
    # An engine needs no tokenizers, a front end no engine, and each of them its own extra.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        homes={
            "text.tokenizer": ("Tokenizer",),
            "openai.typed": (
                "Chat",
                "Completion",
                "Message",
            ),
            "disaggregated.roles": (
                "RoleChange",
                "RoleState",
            ),
            "models.source": ("LocalModel",),
            "calling.client": ("ModelClient",),
            "calling.fake": ("FakeModel", "tool_call"),
            "calling.model": ("Model",),
            "calling.stream": ("ModelStream",),
            "disaggregated.worker": ("DisaggregatedWorker",),
            "embedding": ("EmbedRequest", "Embedded"),
            "engine.interface": (
                "BlockTier",
                "Engine",
                "EngineLimits",
                "EngineLoad",
                "Held",
                "Listener",
                "LoadMetrics",
                "Prefill",
                "RequestTooLong",
                "RunningEngine",
                "Step",
                "StepFailed",
                "Stepper",
                "TransferringEngine",
            ),
            "engine.model": ("Chunk", "EmbeddingModel", "PagedModel"),
            "engine.model_engine": ("ModelEngine",),
            "engine.worker": ("EngineWorker",),
            "generation": (
                "DefaultSampling",
                "GenerateRequest",
                "Generated",
                "Sampling",
                "StructuredOutput",
                "Thinking",
                "TokenLogprob",
            ),
            "hand_over.sink": ("Limits",),
            "http.frontend": ("Frontend",),
            "mock.tiny_model": ("write_tiny_model",),
            "mock.worker": ("MockWorker",),
            "models.card": ("ModelCard", "ModelInput", "ModelType"),
            "models.catalog": ("Catalog",),
            "models.origins": ("ModelUnavailable",),
            "models.register": ("register_adapter", "register_llm"),
            "pipeline.model_router": ("ModelRouter",),
            "pipeline.processor": ("Processor",),
            "proxy.worker": ("OpenAiWorker",),
            "served_model": ("ServedModel", "ServedModelOptions"),
            "small.engine": ("SmallConfig", "SmallEngine"),
            "text.text_model": ("TextModel",),
            "vllm.worker": (
                "Adapter",
                "AdapterAt",
                "VllmWorker",
            ),
            "worker": (
                "ModelWorker",
                "SmallWorker",
            ),
        },
    )
