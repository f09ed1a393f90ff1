"""One decode step: prepare, draft, plan, verify, accept, publish, commit."""
