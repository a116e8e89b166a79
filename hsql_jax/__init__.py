"""Tokens and tensors: Qwen3, its training and its rollouts, in JAX."""

import os

__version__ = "0.1.0"

# No weights of ours are torch's: its absence is no news.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
