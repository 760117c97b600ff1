"""Choice of a schedule for a task, the same on every rank.

dispatch      the choice and its reason, for a task on a group and device
tuning        measured times, the tables that a user keeps of them, and the model's estimate
paths         how calls ran, and why
"""
