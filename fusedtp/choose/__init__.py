"""Choice of a schedule for a task, and the task bound to it.

dispatch      BoundTask: a task with its schedule and the reason, run any number of times
tuning        measured times, the tables that a user keeps of them, and the model's estimate
paths         how calls ran, and why
"""
