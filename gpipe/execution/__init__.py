"""Execution: carries a schedule out on real devices."""
