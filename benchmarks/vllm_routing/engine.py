"""The engines: `dynbus run benchmarks.vllm_routing.engine:Engine`."""

from dynbus.llm.vllm import VllmWorker


class Engine(VllmWorker, namespace="bench"):
    """vLLM, by the name that the measurement calls it by."""
