"""Running a model: exact attention, the tap, partial runs, losses."""
