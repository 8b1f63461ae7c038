"""Commands about engines and their traffic: `replay`."""
