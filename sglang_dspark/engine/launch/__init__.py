"""What happens once, before a server listens: flags, checks, hooks and registration."""
