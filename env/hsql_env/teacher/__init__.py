"""Policies that speak text, and the collection of their trajectories."""
