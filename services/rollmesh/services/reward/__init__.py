"""What an episode is worth: answer keys, scorers, and the decision on a finished group."""
