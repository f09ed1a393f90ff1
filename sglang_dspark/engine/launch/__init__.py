"""Launch a server: flags, checks, hooks and registration, once before it listens."""
