"""Proposing a block of tokens: the network's kernels, its heads and the law that tokens are drawn from."""
