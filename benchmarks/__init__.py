"""Numbers, with the command that made them."""
