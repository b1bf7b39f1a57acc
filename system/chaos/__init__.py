"""Faults on purpose, struck into a run that lives, and what must hold of it afterwards."""
