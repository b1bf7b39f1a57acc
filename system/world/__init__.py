"""Simulated companies as real office files, and the tasks set in them; reads any Harbor task directory."""
