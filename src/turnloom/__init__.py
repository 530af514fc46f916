"""Turnloom: exact tokens for reinforcement learning of agents."""

__version__ = "0.1.0"
