"""Asks all libraries at once, then asks the slow ones what became of their searches."""

import asyncio

from actors import City, Nation, Question, Race

from dynbus import Runtime, call_options


async def main() -> None:
    async with Runtime.connect() as runtime:
        with call_options(wait=10.0):
            answer = await runtime.client(Race).ask(Question(text="The answer is"))
            print(f"{answer.library} was first: {answer.text}")
            for library in (City, Nation):
                search = await runtime.client(library).last_search()
                outcome = "cancelled" if search.cancelled else "finished"
                print(f"{library.__name__} was {outcome} with {library.pages} pages to read")


if __name__ == "__main__":
    asyncio.run(main())
