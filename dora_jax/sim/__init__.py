"""The orchestrator in virtual time: chips and costs, workloads, a world without devices, tables, traces, advice.

    config.py -> workload.py, costs/ -> world.py (instance.py, network.py) -> meter.py (figures, trace) -> table.py,
    advise.py

Standard library only, so that ten thousand instances fit on any machine.
"""
