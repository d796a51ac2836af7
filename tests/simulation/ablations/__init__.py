"""The safeguards of the store, each of which can be switched off: a seed has to miss it.

What is patched here is the product's code as it is; where a safeguard moves, its ablation fails to
apply, and says so.
"""

from tests.simulation.ablations import calls, making, room, staying
from tests.simulation.ablations.table import ABLATIONS, Ablation

__all__ = ["ABLATIONS", "Ablation", "calls", "making", "room", "staying"]
