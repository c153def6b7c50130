"""Optimizers and schedules: `optimizer.py` builds one optimizer for the whole model, `schedule.py` its learning rate."""
