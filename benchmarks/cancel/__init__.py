"""How soon an operator's cancel takes effect."""
