"""What the front end costs: time to first token, CPU of a token, memory of a stream."""
