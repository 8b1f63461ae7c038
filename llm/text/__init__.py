"""Text and tokens: tokenizers, chat templates, and text from tokens as they come."""
