"""The gradient of a step batch, and the step.

This file, `step.py` and `process.py` never import torch.
"""

from system.trainer.process import TrainerError, TrainerProcess
from system.trainer.step import OptimizerSettings, StepMetrics, StepRow, Trainer

__all__ = ["OptimizerSettings", "StepMetrics", "StepRow", "Trainer", "TrainerError", "TrainerProcess"]
