"""How an actor is declared: its class, its handlers, and the types that they take and return."""
