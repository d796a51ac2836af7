"""The safeguards of the store, each of which can be switched off: some seed has to fail without it.

An ablation patches the product's own code. If that code moves, the ablation fails to apply, with
an error.
"""

from tests.simulation.ablations import (
    calls,
    layers,
    making,
    names,
    room,
    staying,
    waking,
    waste,
)
from tests.simulation.ablations.layers import LAYERS
from tests.simulation.ablations.table import ABLATIONS, Ablation, switched_off

__all__ = [
    "ABLATIONS",
    "LAYERS",
    "Ablation",
    "calls",
    "layers",
    "making",
    "names",
    "room",
    "staying",
    "switched_off",
    "waking",
    "waste",
]
