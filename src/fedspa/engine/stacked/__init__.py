"""The back end that runs a round's agents as one stack: CUDA graphs and Triton kernels on a GPU, torch on a CPU."""

from fedspa.engine.stacked.engine import StackedEngine, device_obstacle, slows, supports

__all__ = ["StackedEngine", "device_obstacle", "slows", "supports"]
