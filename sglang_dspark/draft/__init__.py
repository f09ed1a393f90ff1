"""The DSpark draft model in plain torch: checkpoint format, backbone, K/V, Markov head and confidence head."""
