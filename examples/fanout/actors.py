"""Fan-out: three libraries search at once, the first answer wins, the others are cancelled.

`Race` cancels plain asyncio tasks. That is enough: the calls those tasks wait for are
cancelled too, and the libraries, which may run on other machines, stop their search.
"""

import asyncio

from pydantic import BaseModel

from dynbus import Actor, Cancelled, context, depends, handler


class Question(BaseModel):
    text: str


class Answer(BaseModel):
    library: str
    text: str


class Search(BaseModel):
    """What became of a library's last search."""

    pages_read: int
    cancelled: bool


class Library(Actor, namespace="fanout", abstract=True):
    """What all libraries have in common. An abstract actor is never started itself."""

    pages = 1

    async def on_start(self) -> None:
        self.ended = asyncio.Event()
        self.search_made = Search(pages_read=0, cancelled=False)

    @handler
    async def search(self, question: Question) -> Answer:
        pages_read = 0
        self.ended.clear()
        try:
            while pages_read < self.pages:
                if context().is_stopped():
                    raise Cancelled("another library was faster")
                await asyncio.sleep(0.01)  # stands for reading a page
                pages_read += 1
            return Answer(library=type(self).__name__, text=f"{question.text} 42.")
        finally:
            self.search_made = Search(pages_read=pages_read, cancelled=context().is_stopped())
            self.ended.set()

    @handler
    async def last_search(self) -> Search:
        """Waits for a search that still runs."""
        await self.ended.wait()
        return self.search_made


class Village(Library):
    pages = 10


class City(Library):
    pages = 10_000


class Nation(Library):
    pages = 1_000_000


class Race(Actor, namespace="fanout"):
    village = depends(Village)
    city = depends(City)
    nation = depends(Nation)

    @handler
    async def ask(self, question: Question) -> Answer:
        searches = [
            asyncio.create_task(library.search(question))
            for library in (self.village, self.city, self.nation)
        ]
        try:
            done, _ = await asyncio.wait(searches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for search in searches:
                search.cancel()
            await asyncio.wait(searches)
