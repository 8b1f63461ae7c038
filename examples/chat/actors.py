"""Chat: a language model, two engines that compute it, and the front end that people talk to.

dynbus run actors.py -f chat.yaml --log-level warning

The model is SmolLM2, which is downloaded once; where it cannot be had, a mock that says words at
random takes its place. Each request goes to the engine that has most of its conversation in its
cache.
"""

from dynbus.llm import Frontend, ModelWorker


class Front(Frontend, namespace="chat"):
    """Answers HTTP."""


class Engine(ModelWorker, namespace="chat"):
    """One of the engines."""
