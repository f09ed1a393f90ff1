"""Programs that make a particular drafter from nothing."""
