"""Replay: a trace through the real planner and prefix cache, and through the policies of others, without a byte.

`workload` turns a trace into tokens, `pools` holds the memory policies, `costs` the model of time, `simulate` one
replica, `run` several policies at once, `plots` the pictures.
"""

from .costs import DEFAULT_HARDWARE, Costs, Hardware, default_costs
from .pools import policy_names
from .run import DEFAULT_POLICIES, DEFAULT_RATIOS, Task, best_static, compare, run_replay
from .simulate import Options, Simulation
from .workload import Workload

__all__ = [
    "DEFAULT_HARDWARE",
    "DEFAULT_POLICIES",
    "DEFAULT_RATIOS",
    "Costs",
    "Hardware",
    "Options",
    "Simulation",
    "Task",
    "Workload",
    "best_static",
    "compare",
    "default_costs",
    "policy_names",
    "run_replay",
]
