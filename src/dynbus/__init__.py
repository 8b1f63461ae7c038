"""A typed actor message bus on NATS JetStream for serving language models."""
