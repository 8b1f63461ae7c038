"""A worker that takes text in and gives text out."""

import logging

from pydantic import BaseModel

from dynbus.compat.sdk import DYNAMO_IMAGE, dynamo_endpoint, service

# fmt: off
logger = logging.getLogger(__name__)

class RequestType(BaseModel):
    text: str

class ResponseType(BaseModel):
    text: str

@service(
    dynamo={
        "enabled": True,
        "namespace": "demo",
    },
    image=DYNAMO_IMAGE,
)
class TextProcessor:
    def __init__(self) -> None:
        logger.info("Initializing TextProcessor")

    @dynamo_endpoint()
    async def generate(self, req: RequestType):
        """Process the input text."""
        text = req.text
        logger.info(f"Processing text: {text}")
        # Add your processing logic here
        return ResponseType(text=f"Processed: {text}")
# fmt: on
