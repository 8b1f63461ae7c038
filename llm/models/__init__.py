"""Models as data: where their files come from, and the cards that say what is served by whom."""
