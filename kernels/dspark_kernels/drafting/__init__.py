"""Proposing a block of tokens: the network's kernels, its heads and the distribution that tokens are drawn from."""
