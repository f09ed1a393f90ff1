"""One decode step: choose, draft, plan, verify, accept, publish, commit."""
