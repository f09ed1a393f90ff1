"""What becomes of the drafts: the target's logits, adjusted and masked, and what is accepted by them."""
