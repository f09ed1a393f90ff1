"""What the stages of a decode step hand to each other, and how it gets from host to device and back."""
