"""Calls: check arguments, cache the prepared call, bind its tasks to a group and schedule, and run them."""
