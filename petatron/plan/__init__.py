"""What a run will cost before it is started: pipeline schedules simulated and drawn."""
