"""How an actor is called: clients, options, routing, retries."""
