"""Why an episode that an application opens ends without samples: its worker drops it with one of these reasons, and the
coordinator recognizes the one that FinishEpisode asks for."""

NOT_USED = "NOT_USED"
"""No request of the application began in time."""
REWARD_LATE = "REWARD_LATE"
"""Its application has not finished it in time."""
DISCARDED = "DISCARDED"
"""Its application drops it."""
