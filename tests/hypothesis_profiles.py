"""The profiles of hypothesis: `make test-slow` draws all examples, `make check` and a plain pytest a fifth.

A machine that draws them slowly is no fault of a test.
"""

from hypothesis import HealthCheck, settings

ALL, FEW = "all", "few"
SUPPRESSED = (HealthCheck.too_slow,)
settings.register_profile(ALL, max_examples=100, deadline=None, suppress_health_check=SUPPRESSED)
settings.register_profile(FEW, max_examples=20, deadline=None, suppress_health_check=SUPPRESSED)
settings.load_profile(FEW)


def examples(max_examples: int) -> int:
    """Return how many of a test's examples the loaded profile draws."""
    assert settings.default is not None
    return max_examples * settings.default.max_examples // 100
