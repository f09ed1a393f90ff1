"""Drafts without a drafter: what a request's preset proposes from the text at hand. Pure, runs without SGLang."""
