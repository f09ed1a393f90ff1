"""Training a drafter: corpus written by the target, teacher-forced loss, trainer, and offline accept length."""
