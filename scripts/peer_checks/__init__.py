"""Checks of xtok's files and losses in the code of others: one module for each peer."""
