"""Trainers: samples in, better weights out. Importing the package imports no torch."""
