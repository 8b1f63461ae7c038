r"""An agent whose tools are handlers: the model calls what it needs of them, and answers.

dynbus run actors.py, beside a model of the name qwen:
dynbus run dynbus.llm:SmallWorker --SmallWorker.model=hf://Qwen/Qwen3-0.6B \
    --SmallWorker.model_name=qwen
"""

from pydantic import BaseModel

from dynbus import Actor, InvalidRequest, depends, handler
from dynbus.llm import Model

STATES = {7: "sent on Monday", 8: "still packed"}


class Order(BaseModel):
    number: int


class Orders(Actor, namespace="shop"):
    @handler
    async def find(self, order: Order) -> str:
        """Tell where an order is."""
        if order.number not in STATES:
            raise InvalidRequest(f"there is no order {order.number}")
        return STATES[order.number]


class Agent(Actor, namespace="shop"):
    model = depends(Model("qwen", wait=30.0))
    orders = depends(Orders)

    @handler(timeout=120.0)
    async def ask(self, question: str) -> str:
        rules = "You help customers of a shop. Look an order up before you tell of it."
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        answer = await self.model.converse(messages, tools=[self.orders.find])
        return answer.text
