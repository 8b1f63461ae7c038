"""A client that calls the worker of `sdk_guide_4.py`."""

import asyncio

from pydantic import BaseModel

from dynbus.compat.sdk import get_runtime


# fmt: off
# These could also be imported from a shared file/definition
class RequestType(BaseModel):
    text: str

class ResponseType(BaseModel):
    text: str

async def call_text_processor():
    # Get the runtime
    runtime = await get_runtime()

    # Get a client to the TextProcessor service
    client = await runtime.namespace("demo").component("TextProcessor").endpoint("generate").client()

    # Create a request
    request = RequestType(text="Hello, Dynamo!")

    # Call the process endpoint
    response = await client.generate(request)

    # Print the response
    print(f"Response: {response.text}")

# Run the async function
if __name__ == "__main__":
    asyncio.run(call_text_processor())
# fmt: on
