"""A worker whose requests are those of OpenAI's chat completions."""

from dynbus.compat.sdk import dynamo_endpoint, service
from dynbus.llm.openai.requests import ChatRequest as ChatCompletionRequest


@service(dynamo={"namespace": "demo"})
class ChatWorker:
    # fmt: off
    @dynamo_endpoint(name="my_chat_completions_endpoint")
    async def generate(self, request: ChatCompletionRequest):
        # Implementation
        # ...
        last = request.messages[-1]["content"]
        return {"choices": [{"message": {"role": "assistant", "content": f"You said: {last}"}}]}


# fmt: on
