"""Admission: who may use how much of the arena, in which order."""
