"""The DSpark draft model in plain torch: checkpoint format, backbone, Markov head and confidence head."""
