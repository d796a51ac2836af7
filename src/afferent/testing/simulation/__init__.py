"""Simulated machine, for the store's processes and your own processes beside them.

    with simulated(["your.module"]):
        machine = Machine(seed=7)
        process = machine.start_process("mine")
        process.start_thread(your.module.main)
        machine.run(until_s=60.0)

Time, sockets, memory and processes are the machine's; the same seed always gives the same history.
It needs the package ``greenlet``. See docs/simulation.md.
"""

from afferent.testing.simulation.history import History, diagram
from afferent.testing.simulation.loop import Loop
from afferent.testing.simulation.machine import Machine, Process
from afferent.testing.simulation.sockets import LinkRules
from afferent.testing.simulation.substitution import simulated

__all__ = ["History", "LinkRules", "Loop", "Machine", "Process", "diagram", "simulated"]
