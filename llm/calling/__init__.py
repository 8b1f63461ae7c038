"""Models as dependencies: asked by actors and programs on the bus, without a front end."""
