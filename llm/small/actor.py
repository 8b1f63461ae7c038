"""The small engine as an actor: `dynbus run dynbus.llm.small.actor:SmallWorker`."""

from dynbus.llm.worker import ModelWorker


class SmallWorker(ModelWorker, namespace="llm"):
    """Serves a real model of the Llama family, and registers it for front ends."""
