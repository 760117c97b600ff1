"""The cost model, in pure Python: what machines can do, and how long an op takes on one by each schedule."""

from .model import ALGORITHMS, OPS, Prediction, estimate, predict, work_of

__all__ = ["ALGORITHMS", "OPS", "Prediction", "estimate", "predict", "work_of"]
