"""How the hidden tests of generated tasks are run: settings of their manifests."""

TEST_CPU_S = 1.0
"""Limit of CPU time per test, in seconds. A correct answer takes a millisecond."""
TEST_WALL_S = 5.0
"""Limit of wall time per test, in seconds. It is looser, because a busy host must not make a correct answer late."""

# One session for all tests: the calls have no lasting effects, and a jail for each would cost more than the calls.
JUDGING = {"isolate": False, "limits": {"wall_s": TEST_WALL_S, "cpu_s": TEST_CPU_S}, "time_limits_max": 1}
