"""Prepare a worker to serve: compile, capture, measure."""
