"""How long the next turn of a long conversation takes to tokenise."""
