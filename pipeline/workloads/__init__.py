"""What is trained: the protocol of a workload, the built-in ones, and the user's own.

from pipeline.workloads import Workload
"""

from pipeline.workloads.workload import Workload, WorkloadError

__all__ = ["Workload", "WorkloadError"]
