"""The types of requests and responses."""

from pydantic import BaseModel


# fmt: off
class RequestType(BaseModel):
    text: str
    # Add other fields as needed

class ResponseType(BaseModel):
    text: str
    # Add other fields as needed
# fmt: on
