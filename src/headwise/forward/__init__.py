"""Running a model: the tap, partial runs, losses, measurements that share passes, interventions."""
