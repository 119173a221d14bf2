"""Trainers based on other libraries, in one module per library."""
