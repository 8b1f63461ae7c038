"""A whole routing decision: from the token ids of a prompt to the chosen rank."""
