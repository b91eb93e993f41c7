"""Counts for a monitoring system, read only when it asks; one file for each system."""
