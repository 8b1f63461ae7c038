"""Calls the Greeter of actors.py, typed: a wrong request does not pass a type checker."""

import asyncio

from actors import Greeter, Person

from dynbus import Runtime, call_options


async def main() -> None:
    async with Runtime.connect() as runtime:
        greeter = runtime.client(Greeter)
        with call_options(wait=10.0):
            greeting = await greeter.greet(Person(name="Ada"))
            print(greeting.text)
            async for letter in greeter.spell(Person(name="Ada")):
                print(letter)


if __name__ == "__main__":
    asyncio.run(main())
