"""Cost model in pure Python: the rates of machines, and the predicted time of an op for each schedule."""

from .model import ALGORITHMS, OPS, Prediction, estimate, predict, work_of

__all__ = ["ALGORITHMS", "OPS", "Prediction", "estimate", "predict", "work_of"]
