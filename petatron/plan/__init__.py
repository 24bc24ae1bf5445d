"""Simulates and draws pipeline schedules before a run starts."""
