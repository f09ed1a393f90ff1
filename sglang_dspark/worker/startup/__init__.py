"""What a worker does before it serves: compile, capture, measure."""
