"""A run under a virtual clock: `core.schedule` decides, a model of engines, tools and trainer says when it is done."""

from .cluster import Cluster
from .report import Report, report_of
from .run import Policy, Record, Reducer, simulate
from .workload import LognormalWorkload, Recorded, TrialPlan, Turn, Workload

__all__ = [
    "Cluster",
    "LognormalWorkload",
    "Policy",
    "Record",
    "Recorded",
    "Reducer",
    "Report",
    "TrialPlan",
    "Turn",
    "Workload",
    "report_of",
    "simulate",
]
