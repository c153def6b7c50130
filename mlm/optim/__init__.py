"""`optimizer.py` builds one optimizer for the whole model, `schedule.py` its learning rate over the steps."""
