"""Calls the Greeter of actors.py, typed: a wrong request does not pass a type checker.

A call that fails ends the program with one line that says why, and exit code 1.
"""

import asyncio
import sys

from actors import Greeter, Person

from dynbus import DynbusError, Runtime, call_options


async def main() -> None:
    async with Runtime.connect() as runtime:
        greeter = runtime.client(Greeter)
        with call_options(wait=10.0):
            greeting = await greeter.greet(Person(name="Ada"))
            print(greeting.text)
            async for letter in greeter.spell(Person(name="Ada")):
                print(letter)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DynbusError as error:
        sys.exit(f"{error.code}: {error}")
