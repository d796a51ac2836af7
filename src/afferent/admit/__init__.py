"""Admission control: grant requests their bytes of the arena in fair order."""
