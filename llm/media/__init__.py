"""Images and sounds in requests: which may come, how large, and by what they are known."""
