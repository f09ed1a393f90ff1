"""Types that the stages of a decode step hand to each other, and their way from host to device and back."""
