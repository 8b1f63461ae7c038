"""The names of transfers: their subjects, and the bucket of the agents' descriptions."""

from __future__ import annotations

from typing import Final

TRANSFER: Final = "_transfer"
BUCKET: Final = "dynbus_transfer_agents"


def transfer_agent_subject(agent: str) -> str:
    """The subject under which the description of an agent of transfers is stored."""
    return f"$KV.{BUCKET}.{agent}"


def transfer_subject(agent: str, epoch: str) -> str:
    """The subject at which one life of an agent of transfers hears from its peers."""
    return f"{agent}.{TRANSFER}.{epoch}"
