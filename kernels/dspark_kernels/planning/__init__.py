"""The tensors that a step starts from, and those that verification reads."""
