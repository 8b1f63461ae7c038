"""The front end over HTTP: the interfaces of OpenAI and of Anthropic."""
