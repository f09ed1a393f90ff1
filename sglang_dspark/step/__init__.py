"""What the stages of a decode step hand to each other, known to the seam to SGLang and to the worker alike."""
