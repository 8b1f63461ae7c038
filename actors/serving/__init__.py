"""How an object of an actor becomes an instance on the bus."""
