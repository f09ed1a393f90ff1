"""Acceptance of drafts: the target's logits, adjusted and masked, and the drafts that they accept."""
