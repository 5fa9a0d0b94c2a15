"""DP-Fed, the paper's baseline: FedAvg whose local gradients carry Gaussian noise.

Fed-SPA's round with all d coordinates active, and the averaging server.
"""

from fedspa.algorithms.base import Algorithm
from fedspa.algorithms.fedspa import respond
from fedspa.mechanisms.gaussian.mechanism import GAUSSIAN

DP_FED = Algorithm("dp-fed", GAUSSIAN, sparse=False, server="average", respond=respond)
