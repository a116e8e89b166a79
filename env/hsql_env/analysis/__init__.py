"""What trajectories show: behaviour metrics, intervals, and the report."""
