"""Simulated machine, for the store's processes and your own processes beside them.

    with simulated(["your.module"]):
        machine = Machine(seed=7)
        process = machine.start_process("mine")
        process.start_thread(your.module.main)
        machine.run(until_s=60.0)

Time, sockets, memory and processes are the machine's; the same seed always gives the same history.
It needs the package ``greenlet``. See docs/simulation.md.
"""

from tests.simulator.history import History, diagram
from tests.simulator.loop import Loop
from tests.simulator.machine import Machine, Process
from tests.simulator.sockets import LinkRules
from tests.simulator.substitution import simulated

__all__ = ["History", "LinkRules", "Loop", "Machine", "Process", "diagram", "simulated"]
