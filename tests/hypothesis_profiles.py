"""How many examples hypothesis draws: all in `make test-slow`, a fifth in `make check` and in a plain pytest."""

from hypothesis import settings

ALL, FEW = "all", "few"
settings.register_profile(ALL, max_examples=100)
settings.register_profile(FEW, max_examples=20)
settings.load_profile(FEW)


def examples(max_examples: int) -> int:
    """Return how many of a test's examples the loaded profile draws."""
    assert settings.default is not None
    return max_examples * settings.default.max_examples // 100
