"""The front end: OpenAI's interface over HTTP."""
