"""Tools of the model: handlers that look into the shop's books."""

from pydantic import BaseModel

from dynbus import Actor, InvalidRequest, handler

STATES = {7: "Order 7 was sent on Monday.", 8: "Order 8 is still packed."}


class Order(BaseModel):
    number: int


class Orders(Actor, namespace="desk"):
    @handler(idempotent=True)
    async def find(self, order: Order) -> str:
        """Tell where an order is."""
        if order.number not in STATES:
            raise InvalidRequest(f"there is no order {order.number}")
        return STATES[order.number]
