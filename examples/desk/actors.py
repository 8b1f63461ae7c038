"""The desk: it answers customers, and hands conversations that are over to the office.

dynbus run actors.py model.py report.py
python client.py
"""

from guard import Guard
from library import Library
from office import Office
from orders import Orders
from talk import Talk

from dynbus import Actor, InvalidRequest, depends, handler
from dynbus.llm import Model


class Desk(Actor, namespace="desk"):
    model = depends(Model("rules", wait=30.0))
    guard, library = depends(Guard, wait=10.0), depends(Library, wait=10.0)
    orders, office = depends(Orders, wait=10.0), depends(Office, wait=10.0)

    @handler(timeout=120.0, idempotent=True)
    async def ask(self, talk: Talk) -> str:
        question = talk.messages[-1]["content"]
        if not await self.guard.allows(question):
            raise InvalidRequest("please ask again, and kindly")
        article = {"role": "system", "content": await self.library.nearest(question)}
        answer = await self.model.converse([article, *talk.messages], tools=[self.orders.find])
        return answer.text

    @handler(idempotent=True)
    async def close(self, talk: Talk) -> str:
        """Hand a conversation over; the id of the job that sums it up, one for each talk."""
        return (await self.office.close.submit(talk, idempotency_key=talk.id)).id
