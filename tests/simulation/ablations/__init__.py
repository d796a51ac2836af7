"""The safeguards of the store, each of which can be switched off: a seed has to miss it.

What is patched here is the product's code as it is; where a safeguard moves, its ablation fails to
apply, and says so.
"""

from tests.simulation.ablations import calls, layers, making, room, staying, waking, waste
from tests.simulation.ablations.layers import LAYERS
from tests.simulation.ablations.table import ABLATIONS, Ablation, switched_off

__all__ = [
    "ABLATIONS",
    "LAYERS",
    "Ablation",
    "calls",
    "layers",
    "making",
    "room",
    "staying",
    "switched_off",
    "waking",
    "waste",
]
