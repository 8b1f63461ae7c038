"""The bus over nats-server: connection, JetStream, and the embedded server."""
