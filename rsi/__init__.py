"""rsi: one checkpoint proposes terminal environments, solves them, and is trained on both."""

__version__ = "0.1.0"
