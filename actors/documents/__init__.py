"""Documents: of actors as AsyncAPI and JSON Schema, made of their classes alone, and of what dynbus
measures as alert rules and a dashboard."""
