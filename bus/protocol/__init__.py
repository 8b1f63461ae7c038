"""What crosses the bus: subjects, headers, frames, and the state of both ends of a stream."""
