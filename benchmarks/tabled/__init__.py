"""The tables of measured figures, by what they show."""
