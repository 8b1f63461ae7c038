"""What the parts of the support desk tell each other."""

from pydantic import BaseModel

from dynbus import Topic


class Talk(BaseModel):
    """A conversation; its messages have a role and content, the last one is the customer's."""

    id: str
    messages: list[dict[str, str]]


class Closed(BaseModel):
    talk: str
    summary: str


closed = Topic("conversation.closed", Closed, namespace="desk", retain="7d")
