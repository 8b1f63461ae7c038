"""Hello: one actor with a handler that answers once and one that streams.

dynbus run actors.py
python client.py
"""

from collections.abc import AsyncGenerator

from pydantic import BaseModel

from dynbus import Actor, handler


class Person(BaseModel):
    name: str


class Greeting(BaseModel):
    text: str


class Greeter(Actor, namespace="hello"):
    def __init__(self, word: str = "Hello") -> None:
        self.word = word

    @handler
    async def greet(self, person: Person) -> Greeting:
        return Greeting(text=f"{self.word}, {person.name}!")

    @handler
    async def spell(self, person: Person) -> AsyncGenerator[str, None]:
        for letter in person.name:
            yield letter
