"""`dynbus run`: configuration, processes, and what happens when they end."""
