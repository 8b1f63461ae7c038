"""OpenAI's responses as data: requests as chats, and answers as items and events."""
