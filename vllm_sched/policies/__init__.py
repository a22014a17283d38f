"""Scheduling policies: pure objects, the same in the engine, the simulator and the tests."""
